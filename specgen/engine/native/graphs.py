"""Runs a native model's short passes as static ones, captured as CUDA graphs where there is a GPU.

A static pass has a width (tokens, padding included) and a bucket (entries of the KV cache that
attention reads). The host writes one vector of integers to the device; everything else is computed
there: cache indices, positions, rotations and masks. No shape depends on the data, and the host
waits for nothing.

An exact model runs all passes as static ones of one width, and the bucket of a pass follows from
its tokens' indices alone. So the operators add numbers up in the same order for a token whichever
tokens are run with it, and its logits have the same bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from specgen.engine.devices import inference, pinned
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.native.attention_mask import AttentionMask, ancestry
from specgen.engine.native.inputs import KindInputs, PassInputs
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.native_model import NativeForward

WIDTHS = (1, 2, 4, 8, 16)
# tokens from `Ancestry.base` on that a pass can refer to: the bits of an int64 without its sign
SPAN = 63
FIRST_BUCKET = 512  # entries of the KV cache
_LARGEST_STEP = 8192  # entries; up to this size buckets double, beyond it they grow by this much
# they take a mask, and their kernels depend on shapes only
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# libraries choose kernels and allocate memory in the first runs, which must not happen in a capture
_WARM_UPS = 2
# a capture begins with a synchronisation, which would end one in another thread
_CAPTURING = threading.Lock()

Work = Callable[[], None]
# Captures work on fixed buffers, to repeat it with other contents of these buffers: returns a
# function that does so.  It does the work a few times itself. The second argument are the tensors
# that the work both reads and changes: they keep their values. What one `Capture` captures may
# share memory, so none of it may run at the same time. Raises RuntimeError if the work cannot be
# captured.
Capture = Callable[[Work, Sequence[torch.Tensor]], Work]

_log = logging.getLogger(__name__)


class TokenChooser(Protocol):
    """Chooses a token from logits [1, vocabulary] on the device, in operators that a CUDA graph can
    capture and replay.

    A call writes the token to `token` [1], int64: a valid id, even if a logit is NaN. `state` are
    further tensors that a call both reads and changes.
    """

    token: torch.Tensor
    state: Sequence[torch.Tensor]

    def __call__(self, logits: torch.Tensor) -> None: ...


def bucket_of(entries: int) -> int:
    """Returns the size of the bucket for a pass whose last token is the last of `entries` cache
    entries.

    A bucket is the number of cache entries that attention reads, masked ones included: at least
    `entries`, rounded up so that few sizes occur.
    """
    if entries > _LARGEST_STEP:
        return -(-entries // _LARGEST_STEP) * _LARGEST_STEP
    return max(FIRST_BUCKET, 1 << (entries - 1).bit_length())


class StaticPass:
    """A forward pass over at most `width` tokens, with buffers of its own. Call `load`, then `run`,
    then `output`.

    Runs the layers of `forward` on `cache`, and attends to the cache's first `bucket` entries. Keys
    and values are written to `width` entries; those after the pass's tokens are padding, which is
    overwritten before it is read. `long_rope` selects LongRoPE's frequencies for long contexts.
    `run` can be captured in a CUDA graph and replayed until the cache gets a larger buffer, because
    it reads and writes only buffers that keep their addresses.
    """

    def __init__(
        self, forward: NativeForward, cache: KVBuffer, width: int, bucket: int, long_rope: bool
    ) -> None:
        model = forward.model
        size = model.architecture.hidden_size
        device = model.device
        inputs = model.inputs
        self._width = width
        self._forward = forward
        self._first_layer = cache.first_layer
        self._count = 0
        # tensors made in inference mode could not be written outside it
        with torch.inference_mode(False), torch.no_grad():
            self._input = torch.zeros(2 + 2 * width + SPAN + 1, dtype=torch.int64, device=device)
            self._base, self._first, self.ids, self._bits, self._depths = torch.split(
                self._input, [1, 1, width, width, SPAN + 1]
            )
            self._indices = torch.arange(bucket, device=device)
            rows = bucket + width
            self._rotations = [
                None if table is None else table.rows(0, rows, long_rope) for table in inputs.tables
            ]
            self._entering = torch.zeros(width, size, dtype=model.dtype, device=device)
            self._entries = cache.entries(0, cache.buffers[0].shape[3], 0, bucket)
            self._output: ModelOutput | None = None

    def load(self, forward_pass: ForwardPass, hidden: torch.Tensor | None) -> None:
        """Writes the inputs of a pass to the buffers, with one copy to the device, for which the
        host does not wait.

        `hidden` [n, hidden size], on the device, are the hidden states that enter the first layer;
        None: token ids enter. Padding repeats the last token, so that it gives finite numbers if
        the token does.
        """
        base, depths, bits = ancestry(forward_pass)
        ids = forward_pass.ids
        first = forward_pass.first
        self._count = len(bits)
        # what the last token sees besides itself
        others = bits[-1] ^ 1 << (first - base + self._count - 1)
        padding = range(self._count, self._width)
        padding_bits = [others | 1 << (first - base + row) for row in padding]
        later = [depths[-1]] * (SPAN + 1 - len(depths))
        self._write(
            [base, first, *ids, *(ids[-1] for _ in padding), *bits, *padding_bits, *depths, *later]
        )
        if hidden is not None:
            self._entering[: self._count] = hidden
            self._entering[self._count :] = hidden[-1]

    def load_position(self, position: int) -> None:
        """Writes the inputs of a pass of width 1 over the token at this position, except for its
        id, which the caller writes to `ids`."""
        self._count = 1
        self._write([position, position, 0, 1, *range(SPAN + 1)])

    def _write(self, numbers: list[int]) -> None:
        self._input.copy_(pinned(torch.tensor(numbers), self._input.device), non_blocking=True)

    @inference
    def run(self) -> None:
        """Runs the loaded pass, and copies its output to buffers that the first run allocates."""
        forward = self._forward
        hidden = (
            forward.model.embeddings(self.ids) if forward.inputs is None else self._entering.clone()
        )
        with sdpa_kernel(_ATTENTION) if self.ids.is_cuda else nullcontext():
            output = forward.run(
                hidden, forward.with_own_embeddings(self._inputs(), hidden, self.ids)
            )
        if self._output is None:
            with torch.inference_mode(False):
                kept = [None if part is None else torch.zeros_like(part) for part in output]
                self._output = ModelOutput(*kept)  # type: ignore[arg-type]
        for buffer, part in zip(self._output, output, strict=True):
            if buffer is not None and part is not None:
                buffer.copy_(part)

    @property
    def logits(self) -> torch.Tensor:
        assert self._output is not None
        return self._output.logits

    def output(self, logits_to_keep: int) -> ModelOutput:
        """Returns the output for the last `logits_to_keep` tokens of the pass, as views of buffers
        that the next `run` overwrites."""
        assert self._output is not None
        logits, hidden, _, features, _ = self._output
        assert hidden is not None
        kept = slice(self._count - logits_to_keep, self._count)
        return ModelOutput(
            logits[kept],
            hidden[kept],
            features=None if features is None else features[: self._count],
        )

    def _inputs(self) -> PassInputs:
        """Returns the layers' inputs, which are computed on the device from the vector of
        integers."""
        maker = self._forward.model.inputs
        dtype = self._forward.model.dtype
        slots = self._indices[: self._width] + self._first
        offsets = self._indices - self._base
        positions = self._depths.index_select(0, slots - self._base) + self._base
        # no token has bit SPAN
        before = offsets < 0
        bit = offsets.clamp(0, SPAN)
        excluded = ((self._bits[:, None] >> bit) & 1 == 0) & ~before
        key_positions = torch.where(before, offsets, self._depths.index_select(0, bit)) + self._base
        attention_mask = AttentionMask(excluded, positions, key_positions)
        kinds = []
        windows = [
            (kind.window, group) for (kind, _), group in zip(maker.kinds, maker.groups, strict=True)
        ]
        masks = {
            seen: attention_mask.additive(seen[0], dtype, seen[1])
            for seen in dict.fromkeys(windows)
        }
        for seen, rotations in zip(windows, self._rotations, strict=True):
            rotation = None if rotations is None else rotations.index_select(0, positions)[:, None]
            kinds.append(KindInputs(rotation, masks[seen], self._entries))
        return PassInputs(
            self._width, self._width, kinds, first_layer=self._first_layer, slots=slots
        )


class StaticForward:
    """Runs short passes as static ones, and all others by the eager function `forward`. A
    `ForwardFunction`.

    A static pass is made when one of its width and bucket is first needed. A KV cache is enlarged
    at once to the capacity that was reserved. If it grows beyond that, the static passes and their
    graphs are made again. For an exact model, all passes are run in pieces of one width, except for
    draft trees of more than `SPAN` tokens, which are run by the eager function.
    """

    def __init__(self, forward: NativeForward, captures: Captures) -> None:
        self._eager = forward
        self._captures = captures
        self._is_exact = forward.model.exact
        self._widths = captures.widths[-1:] if self._is_exact else captures.widths
        self.choosers: dict[Hashable, TokenChooser] = {}
        self._data: torch.Tensor | None = None  # the buffer that the static passes are made for
        self._passes: dict[tuple[int, int, bool], StaticPass] = {}
        self._replays: dict[Hashable, Work] = {}

    @property
    def feeds(self) -> bool:
        """Whether `feed` can run a chosen token without anything from the host: the function reads
        token ids and has an LM head."""
        return self._eager.inputs is None and self._eager.outer is not None

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        source = self._eager.inputs
        hidden = None if source is None else source(forward_pass)
        self._use(forward_pass.cache, forward_pass.last)
        if not self._is_exact:
            return self._run(forward_pass, hidden, logits_to_keep)
        outputs = []
        first = forward_pass.first
        end = forward_pass.last
        while first < end:  # all tokens of a piece have the same bucket
            last = min(first + self._widths[0], end, bucket_of(first + 1))
            piece = forward_pass._replace(first=first, last=last)
            kept = max(0, logits_to_keep - (end - last))
            entering = (
                None
                if hidden is None
                else hidden[first - forward_pass.first : last - forward_pass.first]
            )
            output = self._run(piece, entering, min(kept, last - first))
            outputs.append([None if part is None else part.clone() for part in output])
            first = last
        columns = zip(*outputs, strict=True)
        return ModelOutput(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]

    def _run(
        self, forward_pass: ForwardPass, hidden: torch.Tensor | None, logits_to_keep: int
    ) -> ModelOutput:
        """Runs a static pass if one is wide enough for the pass's tokens, otherwise the eager
        function.

        `hidden` are the hidden states that enter the first layer; None: token ids enter.
        """
        first = forward_pass.first
        last = forward_pass.last
        cache = forward_pass.cache
        base = first if forward_pass.is_chain else min(first, len(forward_pass.context))
        width = next((width for width in self._widths if width >= last - first), None)
        if width is None or first - base + width > SPAN:
            return self._eager(forward_pass, logits_to_keep)
        static = self._pass(
            cache, width, last if self._is_exact else first + width, forward_pass.long_rope
        )
        static.load(forward_pass, hidden)
        self._replay(static)
        return static.output(logits_to_keep)

    def _use(self, cache: KVBuffer, last: int) -> None:
        """Enlarges the cache if it has no room for `last` tokens, padding and a whole bucket. Drops
        static passes of another buffer."""
        if (needed := bucket_of(last + self._widths[-1])) > cache.buffers[0].shape[3]:
            # the last draft's nodes may come after the capacity
            cache.enlarge(max(needed, bucket_of(cache.capacity + SPAN)))
        if cache.buffers[0] is not self._data:
            self._data = cache.buffers[0]
            self._passes = {}
            self._replays = {}

    def _pass(self, cache: KVBuffer, width: int, entries: int, long_rope: bool) -> StaticPass:
        """Returns the static pass for this number of tokens and of cache entries."""
        key = width, bucket_of(entries), long_rope
        if key not in self._passes:
            self._passes[key] = StaticPass(self._eager, cache, *key)
        return self._passes[key]

    def _replay(self, static: StaticPass, rule: Hashable = None) -> None:
        """Runs a loaded static pass, and if a rule is given its chooser. Captures both before the
        first run."""
        if (static, rule) not in self._replays:
            work: Work = static.run
            state: list[torch.Tensor] = []
            if rule is not None:
                chooser = self.choosers[rule]
                work = partial(_step, static, chooser)
                state = [*chooser.state, chooser.token]
            self._replays[static, rule] = self._captures.captured(work, state)
        self._replays[static, rule]()

    def chooser(self, rule: Hashable, make: Callable[[], TokenChooser]) -> TokenChooser:
        """Returns the chooser for this rule, which `feed` uses: made by `make` at the first call
        with this rule, and then kept."""
        if rule not in self.choosers:
            self.choosers[rule] = make()
        return self.choosers[rule]

    def feed(self, rule: Hashable, cache: KVBuffer, position: int, *, long_rope: bool) -> None:
        """Runs the token that the rule's chooser has chosen last, at this position, and lets it
        choose the next token."""
        cache.length = position
        self._use(cache, position + 1)
        static = self._pass(cache, 1, position + 1, long_rope)
        static.load_position(position)
        self._replay(static, rule)


def _step(static: StaticPass, chooser: TokenChooser) -> None:
    static.ids.copy_(chooser.token)
    static.run()
    chooser(static.logits)


class Captures:
    """Makes static passes for the forward functions of one model, and captures their work until a
    capture fails.

    `widths` are the numbers of tokens of static passes. `capture` captures work; None: the work's
    operators are run one by one. `seconds` is the time that captures have taken.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, capture: Capture | None = None) -> None:
        self.widths = sorted(widths)
        self.seconds = 0.0
        self._capture = capture

    def wrapped(self, forward: NativeForward) -> StaticForward:
        """Returns a function that runs short passes as static ones, and the others by `forward`."""
        return StaticForward(forward, self)

    def captured(self, work: Work, state: Sequence[torch.Tensor]) -> Work:
        """Returns a function that replays the work's graph; if the work cannot be captured, the
        work itself, and no later work is captured."""
        if self._capture is None:
            return work
        start = time.perf_counter()
        try:
            return self._capture(work, state)
        except RuntimeError as error:
            self._capture = None
            reason = str(error.__context__ or error).partition("\n")[0]
            _log.warning(
                "no CUDA graphs from here on, so passes take longer: one could not be captured: %s",
                reason,
            )
            return work
        finally:
            self.seconds += time.perf_counter() - start


class CudaGraphs:
    """Captures work on a CUDA device as graphs, on a stream and in a memory pool of its own. A
    `Capture`.

    Graphs that are captured on one stream share the workspaces of matrix products. So one object
    serves one model, which runs one graph at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work, state: Sequence[torch.Tensor]) -> Work:
        graph = torch.cuda.CUDAGraph()
        stream = self._stream
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        with _CAPTURING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                # a failed capture leaves its stream as the current one
                with torch.cuda.stream(current):
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        for _ in range(_WARM_UPS):
                            work()
                            restore()
                    with torch.cuda.graph(
                        graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                    ):
                        work()
            finally:
                current.wait_stream(stream)
                restore()
        return graph.replay
