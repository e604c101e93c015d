"""Runs a native model's short passes as static ones, captured as CUDA graphs where there is a GPU.

A static pass has a width (tokens, padding included) and a bucket (entries of the KV cache that attention reads). The host writes
one vector of integers to the device; everything else is computed there: cache indices, positions, rotations and masks. No shape
depends on the data, and the host waits for nothing.

An exact model runs all passes as static ones of one width, and the bucket of a pass follows from its tokens' indices alone. So an
operator adds numbers up in the same order for a token, whichever tokens are run with it, and its logits have the same bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol
from weakref import WeakSet

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from specgen.base.types import Context
from specgen.engine.devices import pinned
from specgen.engine.forward_pass import NO_NODES, ForwardFunction, ForwardPass, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.model import Model
from specgen.engine.native.attention import Sight
from specgen.engine.native.inputs import KindInputs, PassInputs, ancestry
from specgen.engine.native.kv_buffer import KVBuffer, LayerEntries
from specgen.engine.native.native_model import NativeForward, NativeModel

WIDTHS = (1, 2, 4, 8, 16)
SPAN = 63  # tokens from `Ancestry.base` on that a pass can refer to: the bits of an int64 without its sign
FIRST_BUCKET = 512  # entries of the KV cache
_LARGEST_STEP = 8192  # entries; buckets are twice as large each up to this one, then this much larger each
_MAX_CHOOSERS = 24  # rules for choosing tokens for which graphs are kept
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take a mask and whose kernels depend on shapes only

_WARM_UPS = 2  # libraries choose kernels and allocate memory in the first runs, which must not happen in a capture
_CAPTURING = threading.Lock()  # a capture begins with a synchronisation, which would end one in another thread

Work = Callable[[], None]
Capture = Callable[[Work, Sequence[torch.Tensor]], Work]
"""Captures work on fixed buffers, to repeat it with other contents of these buffers: returns a function that does so.

It does the work a few times itself. The second argument are the tensors that the work both reads and changes: they keep their
values. What one `Capture` captures may share memory, so none of it may run at the same time, and none is freed before all are.
Raises RuntimeError if the work cannot be captured.
"""

_log = logging.getLogger(__name__)


def bucket_of(entries: int) -> int:
    """Returns how many cache entries a pass attends to, masked ones included, if its last token is the last of `entries`."""
    if entries > _LARGEST_STEP:
        return -(-entries // _LARGEST_STEP) * _LARGEST_STEP
    return max(FIRST_BUCKET, 1 << (entries - 1).bit_length())


def pieces(forward_pass: ForwardPass, width: int) -> Iterator[ForwardPass]:
    """Yields passes over at most `width` tokens each, in order, that together run the tokens of `forward_pass`.

    All tokens of a piece have the same bucket.
    """
    first = forward_pass.first
    while first < forward_pass.last:
        last = min(first + width, forward_pass.last, bucket_of(first + 1))
        yield forward_pass._replace(first=first, last=last)
        first = last


class TokenChooser(Protocol):
    """Chooses a token from logits [1, vocabulary] on the device, in operators that a CUDA graph can capture and replay.

    A call writes it to `token` [1], int64: a valid id, even if a logit is NaN. `state` are the tensors that a call both reads
    and changes.
    """

    token: torch.Tensor
    state: Sequence[torch.Tensor]

    def __call__(self, logits: torch.Tensor) -> None: ...


class StaticPass:
    """A forward pass over at most `width` tokens, with buffers of its own. Used as `load`, `run`, `output`.

    Runs the layers of `forward` on `cache`, and attends to the cache's first `bucket` entries. Keys and values are written to
    `width` entries; those after the pass's tokens are not read before they are written again. `long_rope` selects LongRoPE's
    frequencies for long contexts. `run` can be captured in a CUDA graph and replayed as long as the cache has this buffer: it
    only reads and writes buffers that exist since then, and those of the model.
    """

    def __init__(self, forward: NativeForward, cache: KVBuffer, width: int, bucket: int, *, long_rope: bool = False) -> None:
        model, data = forward.model, cache.parts[0]
        self.width, self._forward, self._cache = width, forward, cache
        self._count = 0  # tokens of the loaded pass
        size, head, device, dtype = model.architecture.hidden_size, forward.parts, model.device, model.dtype
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be written outside it
            self._input = torch.zeros(2 + 2 * width + SPAN + 1, dtype=torch.int64, device=device)
            self._base, self._first, self.ids, self._bits, self._depths = torch.split(self._input, [1, 1, width, width, SPAN + 1])
            self._indices = torch.arange(bucket, device=device)
            rows = bucket + width
            self._rotations = [None if table is None else table.rows(0, rows, long_rope) for table in model.inputs.tables]
            self._hidden_in = None if forward.inputs is None else torch.zeros(width, size, dtype=dtype, device=device)
            self._hidden = torch.zeros(width, size, dtype=dtype, device=device)
            self.logits = self._hidden
            if head is not None:
                self.logits = torch.zeros(width, head.head.out_features, dtype=dtype, device=device)
            taps = len(forward.taps)
            self._features = torch.zeros(width, taps * size, dtype=dtype, device=device) if taps else None
            self._entries = [LayerEntries(layer, layer[0, :, :bucket], layer[1, :, :bucket]) for layer in data.unbind(0)]

    def load(self, forward_pass: ForwardPass, hidden: torch.Tensor | None = None) -> None:
        """Writes the inputs of a pass to the buffers, with one copy to the device, which the host does not wait for.

        `hidden` [n, hidden size], on the device, are the hidden states that enter the first layer, if the forward function takes
        them instead of token ids.
        """
        base, depths, bits = ancestry(forward_pass)
        ids, first, count = forward_pass.ids, forward_pass.first, len(bits)
        padding = range(count, self.width)
        others = bits[-1] ^ 1 << (first - base + count - 1)  # what the last token sees besides itself
        self._count = count
        numbers = [
            *(base, first),
            *ids,
            *(ids[-1] for _ in padding),  # padding repeats the last token, so that its numbers are finite if the token's are
            *bits,
            *(others | 1 << (first - base + row) for row in padding),
            *depths,
            *(depths[-1] for _ in range(SPAN + 1 - len(depths))),
        ]
        self._write(numbers)
        if self._hidden_in is not None:
            assert hidden is not None
            self._hidden_in[:count] = hidden
            self._hidden_in[count:] = hidden[-1]

    def load_position(self, position: int) -> None:
        """Writes the inputs of a pass of width 1 over the token after `position` others, but for its id."""
        self._count = 1
        self._write([position, position, 0, 1, *range(SPAN + 1)])

    @inference
    def run(self) -> None:
        """Runs the loaded pass."""
        with sdpa_kernel(_ATTENTION) if self.ids.is_cuda else nullcontext():
            output = self._forward.run(self.ids, self._hidden_in, self._inputs())
        if output.features is not None and self._features is not None:
            self._features.copy_(output.features)
        assert output.hidden_states is not None
        self._hidden.copy_(output.hidden_states)
        if self.logits is not self._hidden:
            self.logits.copy_(output.logits)

    def output(self, logits_to_keep: int) -> ModelOutput:
        """Returns the output for the last tokens of the pass, as views of the buffers: the next `run` overwrites them."""
        kept = slice(self._count - logits_to_keep, self._count)
        features = None if self._features is None else self._features[: self._count]
        return ModelOutput(self.logits[kept], self._hidden[kept], features=features)

    def _write(self, numbers: list[int]) -> None:
        self._input.copy_(pinned(torch.tensor(numbers), self._input.device), non_blocking=True)

    def _inputs(self) -> PassInputs:
        """Returns the layers' inputs, which are computed on the device from the vector of integers."""
        maker, dtype = self._forward.model.inputs, self._forward.model.dtype
        slots, offsets = self._indices[: self.width] + self._first, self._indices - self._base
        positions = self._depths.index_select(0, slots - self._base) + self._base
        before, bit = offsets < 0, offsets.clamp(0, SPAN)  # no token has bit SPAN
        hidden = ((self._bits[:, None] >> bit) & 1 == 0) & ~before
        key_positions = torch.where(before, offsets, self._depths.index_select(0, bit)) + self._base
        sight, masks, kinds = Sight(hidden, positions, key_positions), dict[int | None, torch.Tensor](), []
        for (kind, _), rotations in zip(maker.kinds, self._rotations, strict=True):
            window = None if kind.window is None or kind.window >= len(self._indices) else kind.window
            if window not in masks:
                masks[window] = sight.mask(window, dtype, maker.group)
            rotation = None if rotations is None else rotations.index_select(0, positions)[:, None]
            kinds.append(KindInputs(rotation, masks[window], self._entries))
        width = self.width
        return PassInputs(width, width, width, kinds, first_layer=self._cache.first_layer, slots=slots)


class StaticForward:
    """Runs short passes as static ones, each made when it is first needed, and the others by the eager function `forward`.

    A `ForwardFunction`. It enlarges a KV cache at once to the capacity that was reserved. When a cache grows beyond that, the
    static passes and their graphs are made again. An exact one runs all passes in pieces of one width: only a draft tree beyond
    `SPAN` is run by the eager function.
    """

    def __init__(self, forward: NativeForward, captures: Captures) -> None:
        self._eager, self._captures, self._is_exact = forward, captures, forward.model.exact
        self._widths = captures.widths[-1:] if self._is_exact else captures.widths
        self._cache: KVBuffer | None = None  # the last pass's
        self._choosers: dict[Hashable, TokenChooser] = {}
        self._drop_passes()
        captures.forwards.add(self)

    @property
    def feeds(self) -> bool:
        """Whether a token that was chosen from the logits can be run without anything from the host, see `feed`."""
        return self._eager.inputs is None and self._eager.parts is not None

    def _drop_passes(self, data: torch.Tensor | None = None) -> None:
        """Drops all passes and graphs. `data` is the KV cache's buffer that the next ones are made for."""
        self._passes: dict[tuple[int, int, bool], StaticPass] = {}
        self._replays: dict[Hashable, Work] = {}
        self._capture = self._captures.new_capture()
        self._data = data

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        source = self._eager.inputs
        hidden = None if source is None else source(forward_pass)
        self._make_room(forward_pass.cache, forward_pass.last)
        if not self._is_exact:
            return self._run(forward_pass, hidden, logits_to_keep)
        outputs = []
        for piece in pieces(forward_pass, self._widths[0]):
            kept = max(0, min(piece.last - piece.first, piece.last - (forward_pass.last - logits_to_keep)))
            entering = None if hidden is None else hidden[piece.first - forward_pass.first : piece.last - forward_pass.first]
            outputs.append([None if part is None else part.clone() for part in self._run(piece, entering, kept)])
        columns = zip(*outputs, strict=True)
        return ModelOutput(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]

    def _run(self, forward_pass: ForwardPass, hidden: torch.Tensor | None, logits_to_keep: int) -> ModelOutput:
        """Runs a static pass if there is one for so many tokens. `hidden` are the hidden states that enter, if it takes them."""
        first, count, cache = forward_pass.first, forward_pass.last - forward_pass.first, forward_pass.cache
        base = first if forward_pass.is_chain else min(first, len(forward_pass.context))
        width = next((width for width in self._widths if width >= count), None)
        if width is None or first - base + width > SPAN:
            return self._eager(forward_pass, logits_to_keep)
        end = forward_pass.last if self._is_exact else first + width
        key = width, self._bucket(cache, end), forward_pass.long_rope
        static = self._pass(cache, *key)
        static.load(forward_pass, hidden)
        self._replay(key, static.run, ())()
        return static.output(logits_to_keep)

    def _pass(self, cache: KVBuffer, width: int, bucket: int, long_rope: bool) -> StaticPass:
        key = width, bucket, long_rope
        if key not in self._passes:
            self._passes[key] = StaticPass(self._eager, cache, width, bucket, long_rope=long_rope)
        return self._passes[key]

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures what is missing for runs; see `Captures.capture_passes`."""
        cache = self._cache
        if cache is None:
            return
        ropes = {key[2] for key in self._passes} or {False}
        self._make_room(cache, longest)
        last = longest + self._widths[-1]
        first = min(1 if self._is_exact else shortest, last)
        for bucket in sorted({self._bucket(cache, entries) for entries in (*range(first, last, FIRST_BUCKET), last)}):
            for long_rope in ropes:
                for width in reversed(self._widths):
                    static = self._pass(cache, width, bucket, long_rope)
                    entering = torch.zeros(width, self._eager.model.architecture.hidden_size, device=self._eager.model.device)
                    static.load(ForwardPass(Context([0] * width), NO_NODES, 0, width, cache, long_rope), entering)
                    self._replay((width, bucket, long_rope), static.run, [cache.parts[0][:, :, :, :width]])
                for rule, chooser in self._choosers.items():
                    static = self._pass(cache, 1, bucket, long_rope)
                    static.load_position(0)
                    state = [*chooser.state, chooser.token, cache.parts[0][:, :, :, :1]]
                    self._replay((rule, bucket, long_rope), partial(_step, static, chooser), state)

    def chooser(self, rule: Hashable, make: Callable[[], TokenChooser]) -> TokenChooser:
        """Returns the chooser for this rule, which `feed` uses: made by `make`, and the same one for equal rules."""
        if rule not in self._choosers:
            if len(self._choosers) == _MAX_CHOOSERS:
                self._choosers.clear()
                self._drop_passes(self._data)
            self._choosers[rule] = make()
        return self._choosers[rule]

    def feed(self, rule: Hashable, cache: KVBuffer, position: int, *, long_rope: bool) -> None:
        """Runs the token that the rule's chooser chose last, after `position` others, and chooses the next one."""
        cache.length = position
        self._make_room(cache, position + 1)
        bucket, chooser = self._bucket(cache, position + 1), self._choosers[rule]
        static = self._pass(cache, 1, bucket, long_rope)
        static.load_position(position)
        self._replay((rule, bucket, long_rope), partial(_step, static, chooser), [*chooser.state, chooser.token])()

    def _make_room(self, cache: KVBuffer, last: int) -> None:
        """Enlarges the cache if it has no room for `last` tokens, for padding, and for the entries that attention reads."""
        if (needed := bucket_of(last + self._widths[-1])) > cache.parts[0].shape[3]:
            cache.enlarge(max(needed, bucket_of(cache.capacity + SPAN)))  # the last draft's nodes may come after the capacity

    def _bucket(self, cache: KVBuffer, entries: int) -> int:
        """Returns the bucket for this number of cache entries. Drops the passes of another buffer."""
        if cache.parts[0] is not self._data:
            self._drop_passes(cache.parts[0])
        self._cache = cache
        return bucket_of(entries)

    def _replay(self, key: Hashable, work: Work, state: Sequence[torch.Tensor]) -> Work:
        """Returns what does the work; at the first time for this key, captures it."""
        if key not in self._replays:
            self._replays[key] = self._captures.captured(self._capture, str(key), work, state)
        return self._replays[key]


def _step(static: StaticPass, chooser: TokenChooser) -> None:
    static.ids.copy_(chooser.token)
    static.run()
    chooser(static.logits)


class Captures:
    """Runs the forward functions of one model as static passes of these widths, and captures them until a capture fails.

    `new_capture` is called for each forward function and each buffer of its KV cache; what it returns captures work (None: the
    work's operators are run one by one). `seconds` is the time that captures have taken.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, new_capture: Callable[[], Capture | None] = lambda: None) -> None:
        self.widths, self.new_capture = sorted(widths), new_capture
        self.seconds, self._is_off = 0.0, False
        self.forwards: WeakSet[StaticForward] = WeakSet()

    def wrapped(self, forward: NativeForward) -> ForwardFunction:
        """Returns a function that runs static passes where `forward` would run short ones."""
        return StaticForward(forward, self)

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures the passes that runs may need, so that no capture falls into the time of a run.

        Those are runs whose prompts have at least `shortest` tokens, and at most `longest` together with their output. Only for
        forward functions that have run a pass before, and for ways to choose tokens that were used. What KV caches hold stays
        valid.
        """
        for forward in list(self.forwards):
            forward.capture_passes(shortest, longest)

    def captured(self, capture: Capture | None, name: str, work: Work, state: Sequence[torch.Tensor]) -> Work:
        """Returns the work's graph, or the work itself if it cannot be captured."""
        if capture is None or self._is_off:
            return work
        start = time.perf_counter()
        try:
            return capture(work, state)
        except RuntimeError as error:
            self._is_off = True
            reason = str(error.__context__ or error).partition("\n")[0]
            _log.warning("no CUDA graphs from here on, so passes take longer: %s could not be captured: %s", name, reason)
            return work
        finally:
            self.seconds += time.perf_counter() - start


class CudaGraphs:
    """Captures work on a CUDA device, on the stream `stream`, with a memory pool of its own. A `Capture`.

    Graphs that are captured on one stream share the workspaces of matrix products. So a stream is for one model, which does one
    thing at a time.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Work, state: Sequence[torch.Tensor]) -> Work:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        saved = [tensor.clone() for tensor in state]
        with _CAPTURING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.stream(current):  # a failed capture leaves its stream as the current one
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        for _ in range(_WARM_UPS):
                            work()
                            _restore(state, saved)
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            finally:
                current.wait_stream(stream)
                _restore(state, saved)
        self._graphs.append(graph)
        return graph.replay


def _restore(state: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)


def use_cuda_graphs(model: NativeModel) -> None:
    """Makes a model on a CUDA device run its short passes as CUDA graphs, in all forward functions that are made from now on."""
    stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
    model.captures = Captures(WIDTHS, partial(CudaGraphs, model.device, stream))


def captures_of(model: Model) -> Captures | None:
    """Returns what captures a model's passes; None for a model whose passes are not captured."""
    return model.captures if isinstance(model, NativeModel) else None  # type: ignore[no-any-return]
