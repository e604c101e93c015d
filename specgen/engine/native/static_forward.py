"""Runs a native model's short passes as static ones, captured as CUDA graphs where there is a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specgen.engine.forward_pass import ChoiceRule, ForwardPass, ModelOutput, TokenChooser
from specgen.engine.native.ancestry import base_of
from specgen.engine.native.cuda_graphs import CudaGraphs, Graphs, Work
from specgen.engine.native.kernels.checked_kernels import checked_kernels
from specgen.engine.native.kernels.kernel_set import SPAN
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.self_feeding import SelfFeedingPass, TokenChoice
from specgen.engine.native.static_pass import StaticPass, StaticWork
from specgen.engine.tolerances import logits_error

WIDTHS = (1, 2, 4, 8, 16)
FIRST_BUCKET = 512  # the next ones are twice as large each, the last one is the cache's capacity
_MAX_RULES = 8  # rules for choosing tokens for which graphs are kept

_log = logging.getLogger(__name__)


def pick_width(tokens: int, widths: Sequence[int] = WIDTHS) -> int | None:
    """Returns the smallest of the ascending `widths` for a pass over this number of tokens; None if all are smaller."""
    return next((width for width in widths if width >= tokens), None)


def pick_bucket(entries: int, capacity: int) -> int | None:
    """Returns the smallest bucket of at least `entries`, for a KV cache with room for `capacity` tokens; None if that is less."""
    bucket = FIRST_BUCKET
    while bucket < entries:
        bucket *= 2
    return min(bucket, capacity) if entries <= capacity else None


def use_static_passes(model: NativeModel, widths: Sequence[int] = WIDTHS, new_graphs: Callable[[], Graphs] | None = None) -> None:
    """Makes a model run its short passes as static ones, in all forward functions that are made from now on.

    With one width, equal to or above the longest draft's tokens + 1, a token's logits do not depend on the tokens run with it.
    `new_graphs` makes what captures the passes of one forward function; None runs their operators one by one.
    """
    capturing = None if new_graphs is None else Capturing(new_graphs)
    model.wrap = lambda forward: StaticForward(forward, widths, capturing)


def use_cuda_graphs(model: NativeModel) -> None:
    """Makes a model on a CUDA device run its short passes as CUDA graphs, in all forward functions made from now on.

    An exact model runs all of them at one width, so that a token's logits have the same bits whichever tokens are run with it.
    """
    stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
    widths = WIDTHS[-1:] if model.exact else WIDTHS
    model.inputs.kernels = checked_kernels(model.architecture, model.dtype, model.device, widths)
    use_static_passes(model, widths, partial(CudaGraphs, model.device, stream))


@dataclass(slots=True)
class Capturing:
    """Captures the static passes of one model, until a capture fails or its replay gives other logits.

    `new_graphs` is called for each forward function.
    """

    new_graphs: Callable[[], Graphs]
    is_off: bool = False

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
    static passes and their graphs are made again. With `capturing`, passes are captured, and it is `SelfFeeding`.
    """

    def __init__(self, forward: StaticWork, widths: Sequence[int] = WIDTHS, capturing: Capturing | None = None) -> None:
        self._eager, self._widths, self._capturing = forward, sorted(widths), capturing
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
        first, cache = forward_pass.first, forward_pass.cache
        width = pick_width(forward_pass.last - first, self._widths)
        self._make_room(cache, forward_pass.last + self._widths[-1])
        reads = self._eager.prepare(forward_pass)
        if width is None or first - base_of(forward_pass) + width > SPAN:
            return self._eager(forward_pass, logits_to_keep)
        if len(reads) != len(self._reads) or any(new is not old for new, old in zip(reads, self._reads, strict=True)):
            self._drop_passes(cache.data)
            self._reads = reads
        source = self._eager.inputs
        hidden = None if source is None else source(forward_pass)
        key = width, self._bucket(cache, first + width), forward_pass.long_rope
        if key not in self._passes:
            self._passes[key] = StaticPass(self._eager, cache, *key[:2], long_rope=key[2])
        static = self._passes[key]
        static.load(forward_pass, hidden)
        self._run(key, f"passes of {width} tokens over {key[1]} cache entries", static.run, (), static.logits)
        return static.output(logits_to_keep)

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
        self._run(rule, "the choice of a token" if choice.width == 1 else "the choice of a level", choice.run, choice.state)

    def feed(self, rule: ChoiceRule, cache: KVBuffer, root: int, level: int, levels: int, *, long_rope: bool) -> None:
        """Runs the tokens chosen last, and chooses the next ones; see `forward_pass.SelfFeeding`."""
        choice = self._choices[rule]
        width = choice.width
        cache.length = position = root + width * level
        end = position + 1 if choice.chooser.parents is None else root + width * levels  # a tree's passes have the same inputs
        self._make_room(cache, end)
        key = rule, self._bucket(cache, end), long_rope
        if key not in self._self_feeding:
            static = StaticPass(self._eager, cache, width, key[1], long_rope=long_rope)
            self._self_feeding[key] = SelfFeedingPass(static, choice)
        step = self._self_feeding[key]
        step.load(position, is_root=level == 0)
        what = "draft steps" if width == 1 else f"levels of {width} drafted tokens"
        self._run(key, f"{what} over {key[1]} cache entries", step.run, step.state, step.logits)
        step.has_run(position)

    def _make_room(self, cache: KVBuffer, room: int) -> None:
        """Enlarges the cache if it has no room for so many tokens, padding included."""
        if room > cache.data.shape[3]:
            cache.enlarge(max(room, cache.capacity + SPAN, FIRST_BUCKET))  # the last draft's nodes may come after its capacity

    def _bucket(self, cache: KVBuffer, entries: int) -> int:
        """Returns the bucket for this number of cache entries. Drops the passes of another buffer.

        It is the whole buffer if attention reads from the device how many entries there are, else the smallest bucket.
        """
        if cache.data is not self._data:
            self._drop_passes(cache.data)
        capacity = cache.data.shape[3]
        bucket = capacity if self._eager.model.inputs.kernels.finds_keys else pick_bucket(entries, capacity)
        assert bucket is not None  # the cache has room for all widths
        return bucket

    def _run(
        self, key: Hashable, name: str, work: Work, state: Sequence[torch.Tensor] = (), logits: torch.Tensor | None = None
    ) -> None:
        """Does the work. At the first time for this key, captures it if there are graphs; see `Capturing.capture`."""
        replay = self._replays.get(key)
        if replay is None:
            replay = work
            if self._capturing is not None and self._graphs is not None:
                replay = self._capturing.capture(self._graphs, name, work, state, logits)
            self._replays[key] = replay
        replay()
