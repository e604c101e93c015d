"""Runs a native model's short passes as static ones, captured as CUDA graphs where there is a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import torch

from specgen.base.types import Context
from specgen.engine.forward_pass import NO_NODES, ChoiceRule, ForwardFunction, ForwardPass, ModelOutput, TokenChooser
from specgen.engine.native.ancestry import base_of
from specgen.engine.native.cuda_graphs import CudaGraphs, Graphs, Work, with_attention_of_graphs
from specgen.engine.native.equal_bits import FIRST_BUCKET, bucket_of, joined, pieces
from specgen.engine.native.kernels.checked_kernels import checked_kernels
from specgen.engine.native.kernels.kernel_set import SPAN
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.self_feeding import SelfFeedingPass, TokenChoice
from specgen.engine.native.static_pass import StaticPass, StaticWork
from specgen.engine.tolerances import logits_error

WIDTHS = (1, 2, 4, 8, 16)
_MAX_RULES = 24  # rules for choosing tokens for which graphs are kept

_log = logging.getLogger(__name__)


def pick_width(tokens: int, widths: Sequence[int] = WIDTHS) -> int | None:
    """Returns the smallest of the ascending `widths` for a pass over this number of tokens; None if all are smaller."""
    return next((width for width in widths if width >= tokens), None)


def pick_bucket(entries: int, capacity: int) -> int | None:
    """Returns the smallest bucket of at least `entries`, for a KV cache with room for `capacity` tokens; None if that is less.

    The buckets are twice as large each, the last one is the capacity.
    """
    bucket = FIRST_BUCKET
    while bucket < entries:
        bucket *= 2
    return min(bucket, capacity) if entries <= capacity else None


def use_static_passes(model: NativeModel, widths: Sequence[int] = WIDTHS, new_graphs: Callable[[], Graphs] | None = None) -> None:
    """Makes a model run its short passes as static ones, in all forward functions that are made from now on.

    An exact model runs all passes as static ones, of the widest of the `widths`, so that a token's logits have the same bits
    whichever tokens are run with it. `new_graphs` makes what captures the passes of one forward function; None runs their
    operators one by one.
    """
    capturing = None if new_graphs is None else Capturing(new_graphs)
    model.wrap = lambda forward: StaticForward(forward, widths, capturing, exact=model.exact)
    model.captures = capturing


def use_cuda_graphs(model: NativeModel) -> None:
    """Makes a model on a CUDA device run its static passes as CUDA graphs; see `use_static_passes`."""
    stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
    widths = WIDTHS[-1:] if model.exact else WIDTHS
    model.inputs.kernels = checked_kernels(model.architecture, model.dtype, model.device, widths)
    use_static_passes(model, widths, partial(CudaGraphs, model.device, stream))
    run_statically, checked = model.wrap, [(model.architecture, model.inputs.kernels)]
    assert run_statically is not None

    def wrap(forward: StaticWork) -> ForwardFunction:
        """Returns a function that runs static passes. A head's layers get fused kernels that were checked for their shapes."""
        own = forward.model
        if own is not model:
            found = [kernels for architecture, kernels in checked if architecture == own.architecture]
            if not found:
                found = [checked_kernels(own.architecture, own.dtype, own.device, widths)]
                checked.append((own.architecture, found[0]))
            own.inputs.kernels = found[0]
        return run_statically(forward)

    model.wrap = wrap


@dataclass(slots=True)
class Capturing:
    """Captures the static passes of one model, until a capture fails or its replay gives other logits.

    `new_graphs` is called for each forward function. `seconds` is the time that captures have taken. Implements
    `native_model.Captures`.
    """

    new_graphs: Callable[[], Graphs]
    is_off: bool = False
    seconds: float = 0.0
    forwards: WeakSet[StaticForward] = field(default_factory=WeakSet)

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures what is missing for runs; see `engine.model.Model`."""
        for forward in list(self.forwards):
            forward.capture_passes(shortest, longest)

    def capture(
        self, graphs: Graphs, name: str, work: Work, state: Sequence[torch.Tensor], logits: torch.Tensor | None = None
    ) -> Work:
        """Returns a function that does the work: its graph, or the work itself if that cannot be captured. Logs which.

        `logits` is a buffer that the work writes. The graph is used only if a replay writes the same numbers, but for rounding.
        """
        if self.is_off:
            return work
        start = time.perf_counter()
        try:
            return self._captured(graphs, name, work, state, logits)
        finally:
            self.seconds += time.perf_counter() - start

    def _captured(
        self, graphs: Graphs, name: str, work: Work, state: Sequence[torch.Tensor], logits: torch.Tensor | None
    ) -> Work:
        start = time.perf_counter()
        try:
            replay = graphs.capture(work, state)
            wrong = None if logits is None else logits_error(_result(replay, logits, state), _result(work, logits, state))
        except RuntimeError as error:  # the first replay takes memory, too
            self.is_off = True
            message = "no CUDA graphs from here on, so passes take longer: %s could not be captured: %s"
            _log.warning(message, name, _first_cause(error))
            return work
        if wrong is not None:
            self.is_off = True
            _log.warning("no CUDA graphs from here on, so passes take longer: replays of %s %s", name, wrong)
            return work
        _log.info("captured %s in %.0f ms", name, 1000 * (time.perf_counter() - start))
        return replay


def _first_cause(error: BaseException) -> str:
    """Returns the first line of the error that made a capture invalid, which the end of the capture reports as another one."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).partition("\n")[0]


def _result(work: Work, logits: torch.Tensor, state: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Returns a function that does the work and returns the logits that it writes. The tensors of `state` keep their values."""

    def run() -> torch.Tensor:
        saved = [tensor.clone() for tensor in state]
        work()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return logits.clone()

    return run


class StaticForward:
    """Runs short passes as static ones, each made when it is first needed, and the others by the eager function `forward`.

    A `ForwardFunction`. It enlarges a KV cache at once to the capacity that was reserved. When a cache grows beyond that, the
    static passes and their graphs are made again. With `capturing`, passes are captured, and it is `SelfFeeding`. If it is
    `exact`, it runs all passes in pieces, see `equal_bits`: only a draft tree beyond `SPAN` is run by the eager function.
    """

    def __init__(
        self,
        forward: StaticWork,
        widths: Sequence[int] = WIDTHS,
        capturing: Capturing | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self._eager, self._capturing, self._is_exact = forward, capturing, exact
        self._widths = sorted(widths)[-1:] if exact else sorted(widths)
        self._cache: KVBuffer | None = None  # the last pass's
        if capturing is not None:
            capturing.forwards.add(self)
        self.feeds = capturing is not None and forward.feeds
        self._choices: dict[ChoiceRule, TokenChoice] = {}
        self._reads: Sequence[torch.Tensor] = ()  # buffers of other models that the passes read
        self._drop_passes()

    def _drop_passes(self, data: torch.Tensor | None = None) -> None:
        """Drops all passes and graphs. `data` is the KV cache's buffer that the next ones are made for."""
        self._passes: dict[tuple[int, int, bool], StaticPass] = {}
        self._self_feeding: dict[tuple[ChoiceRule, int, bool], SelfFeedingPass] = {}
        self._replays: dict[Hashable, Work] = {}
        self._graphs = None if self._capturing is None else self._capturing.new_graphs()
        self._data = data

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        self._make_room(forward_pass.cache, forward_pass.last, self._widths[-1])
        if self._is_exact:
            return self._in_pieces(forward_pass, logits_to_keep)
        width = self._width(forward_pass)
        self._prepare(forward_pass)
        if width is None:
            return self._eager(forward_pass, logits_to_keep)
        source = self._eager.inputs
        return self._static(forward_pass, width, None if source is None else source(forward_pass), logits_to_keep)

    def _prepare(self, forward_pass: ForwardPass) -> None:
        """Prepares the forward function for a pass. Drops all passes if it reads other buffers of another model now."""
        reads = self._eager.prepare(forward_pass)
        if len(reads) != len(self._reads) or any(new is not old for new, old in zip(reads, self._reads, strict=True)):
            self._drop_passes(forward_pass.cache.data)
            self._reads = reads

    def _in_pieces(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        """Runs a pass in pieces of one width."""
        first, source, outputs = forward_pass.first, self._eager.inputs, []
        hidden = None if source is None else source(forward_pass)
        for piece in pieces(forward_pass, self._widths[0]):
            count = piece.last - piece.first
            kept = max(0, min(count, piece.last - (forward_pass.last - logits_to_keep)))
            entering = None if hidden is None else hidden[piece.first - first : piece.last - first]
            width = self._width(piece)
            self._prepare(piece)
            output = self._eager(piece, kept) if width is None else self._static(piece, width, entering, kept)
            if count == forward_pass.last - first:
                return output
            outputs.append(ModelOutput(*(None if part is None else part.clone() for part in output)))  # type: ignore[arg-type]
        return joined(outputs)

    def _width(self, forward_pass: ForwardPass) -> int | None:
        """Returns the width of the static pass that can run these tokens; None if there is none."""
        width = pick_width(forward_pass.last - forward_pass.first, self._widths)
        return None if width is None or forward_pass.first - base_of(forward_pass) + width > SPAN else width

    def _static(self, forward_pass: ForwardPass, width: int, hidden: torch.Tensor | None, logits_to_keep: int) -> ModelOutput:
        """Runs a static pass. `hidden` are the hidden states that enter it, if it takes them."""
        first, cache = forward_pass.first, forward_pass.cache
        key = width, self._bucket(cache, forward_pass.last if self._is_exact else first + width), forward_pass.long_rope
        if key not in self._passes:
            self._passes[key] = StaticPass(self._eager, cache, *key[:2], long_rope=key[2])
        static = self._passes[key]
        static.load(forward_pass, hidden)
        self._replay_of(key, _name(static), static.run, (), static.logits)()
        return static.output(logits_to_keep)

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures what is missing for runs; see `engine.model.Model`. The KV cache keeps what it holds."""
        cache = self._cache
        if cache is None:
            return
        ropes = {key[2] for key in self._passes} or {False}
        self._make_room(cache, longest, self._widths[-1])
        last = min(longest + self._widths[-1], cache.data.shape[3])
        first = min(1 if self._is_exact else shortest, last)
        for bucket in sorted({self._bucket(cache, entries) for entries in (*range(first, last, FIRST_BUCKET), last)}):
            for long_rope in ropes:
                for width in reversed(self._widths):
                    self._capture_pass(cache, width, bucket, long_rope)
                for rule in self._choices:
                    self._capture_step(cache, rule, bucket, long_rope)

    def _capture_pass(self, cache: KVBuffer, width: int, bucket: int, long_rope: bool) -> None:
        key = width, bucket, long_rope
        if key in self._replays or width > bucket:
            return
        static = self._passes[key] = StaticPass(self._eager, cache, width, bucket, long_rope=long_rope)
        entering = self._eager.widths.inputs
        hidden = torch.zeros(width, entering, dtype=self._eager.model.dtype, device=self._eager.model.device)
        static.load(ForwardPass(Context([0] * width), NO_NODES, 0, width, cache, long_rope), hidden)
        self._replay_of(key, _name(static), static.run, [cache.data[:, :, :, :width]], static.logits)

    def _capture_step(self, cache: KVBuffer, rule: ChoiceRule, bucket: int, long_rope: bool) -> None:
        choice = self._choices[rule]
        if rule not in self._replays:
            self._replay_of(rule, _choice_name(choice), choice.run, choice.state)
        key = rule, bucket, long_rope
        if key in self._replays or choice.width > bucket:
            return
        step = self._step(cache, key)
        step.load(0, is_root=True)
        self._replay_of(
            key, _step_name(choice, bucket), step.run, [*step.state, cache.data[:, :, :, : choice.width]], step.logits
        )

    def chooser(self, rule: ChoiceRule) -> TokenChooser:
        """Returns the chooser for this rule, which `choose` and `feed` use; see `forward_pass.SelfFeeding`."""
        if rule not in self._choices:
            if len(self._choices) == _MAX_RULES:
                self._choices.clear()
                self._drop_passes(self._data)
            self._choices[rule] = TokenChoice(rule, self._eager)
        return self._choices[rule].chooser

    def choose(self, rule: ChoiceRule, logits: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Chooses the first token, or level of a tree; see `forward_pass.SelfFeeding`."""
        choice = self._choices[rule]
        choice.load(logits, hidden)
        self._replay_of(rule, _choice_name(choice), choice.run, choice.state)()

    def feed(self, rule: ChoiceRule, cache: KVBuffer, root: int, level: int, levels: int, *, long_rope: bool) -> None:
        """Runs the tokens chosen last, and chooses the next ones; see `forward_pass.SelfFeeding`."""
        choice = self._choices[rule]
        width = choice.width
        cache.length = position = root + width * level
        end = position + 1 if choice.chooser.parents is None else root + width * levels  # a tree's passes have the same inputs
        self._make_room(cache, end)
        key = rule, self._bucket(cache, end), long_rope
        step = self._step(cache, key)
        step.load(position, is_root=level == 0)
        self._replay_of(key, _step_name(choice, key[1]), step.run, step.state, step.logits)()
        step.has_run(position)

    def _step(self, cache: KVBuffer, key: tuple[ChoiceRule, int, bool]) -> SelfFeedingPass:
        """Returns the self-feeding pass for this rule, bucket and choice of rotary frequencies."""
        if key not in self._self_feeding:
            choice = self._choices[key[0]]
            static = StaticPass(self._eager, cache, choice.width, key[1], long_rope=key[2])
            self._self_feeding[key] = SelfFeedingPass(static, choice)
        return self._self_feeding[key]

    def _make_room(self, cache: KVBuffer, last: int, padding: int = 0) -> None:
        """Enlarges the cache if it has no room for `last` tokens and as much padding."""
        if (room := self._room(last, padding)) > cache.data.shape[3]:
            # the last draft's nodes may come after the capacity
            cache.enlarge(max(room, self._room(cache.capacity, SPAN), FIRST_BUCKET))

    def _room(self, entries: int, padding: int) -> int:
        """Returns how many entries a buffer needs for these many with padding after them, and for all that they attend to."""
        is_read = self._is_exact and not self._eager.model.inputs.kernels.finds_keys
        return max(entries + padding, bucket_of(entries)) if is_read else entries + padding

    def _bucket(self, cache: KVBuffer, entries: int) -> int:
        """Returns the bucket for this number of cache entries. Drops the passes of another buffer.

        It is the whole buffer if attention reads from the device how many entries there are, else the smallest bucket.
        """
        if cache.data is not self._data:
            self._drop_passes(cache.data)
        self._cache = cache
        capacity = cache.data.shape[3]
        if self._eager.model.inputs.kernels.finds_keys:
            return capacity
        bucket = bucket_of(entries) if self._is_exact else pick_bucket(entries, capacity)
        assert bucket is not None  # the cache has room for all widths
        return bucket

    def _replay_of(
        self, key: Hashable, name: str, work: Work, state: Sequence[torch.Tensor] = (), logits: torch.Tensor | None = None
    ) -> Work:
        """Returns what does the work. At the first time for this key, captures it if there are graphs; see `Capturing`."""
        replay = self._replays.get(key)
        if replay is None:
            replay = work
            if self._capturing is not None and self._graphs is not None:
                replay = self._capturing.capture(self._graphs, name, work, state, logits)
            if replay is work and self._is_exact and self._eager.model.device.type == "cuda":
                replay = with_attention_of_graphs(work)
            self._replays[key] = replay
        return replay


def _name(static: StaticPass) -> str:
    return f"passes of {static.width} tokens over {static.bucket} cache entries"


def _choice_name(choice: TokenChoice) -> str:
    return "the choice of a token" if choice.width == 1 else "the choice of a level"


def _step_name(choice: TokenChoice, bucket: int) -> str:
    what = "draft steps" if choice.width == 1 else f"levels of {choice.width} drafted tokens"
    return f"{what} over {bucket} cache entries"
