"""The kernels as functions of torch tensors. All tensors are float32 on the CPU, unless said
otherwise, and their last dimension is contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from specgen.base.errors import RunError
from specgen.engine.kernels.branches import (
    KindTable,
    PassProgram,
    Places,
    Program,
    SegmentInputs,
)
from specgen.engine.kernels.experts import ExpertsWeight
from specgen.engine.kernels.library import Library, kernels
from specgen.engine.kernels.packing import PackedWeight

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class SeenSlots(NamedTuple):
    """Which slots of a KV cache the rows of a pass see.

    Row i sees the slots `ranges[i, 0]` to `ranges[i, 1]` - 1 and then
    `others[ranges[i, 2] : ranges[i, 3]]`, all ascending. Both are int32 tensors.
    """

    ranges: Tensor
    others: Tensor

    def without_first(self, count: int) -> SeenSlots:
        """Returns the same slots without the first `count` ones of the cache, which are before all
        `others`."""
        ranges = self.ranges.clone()
        ranges[:, :2].clamp_(min=count)
        return self._replace(ranges=ranges)


@cache
def own_kernels() -> Kernels | None:
    """Returns the kernels of this process; None where there are none."""
    library = kernels()
    return None if library is None else Kernels(library)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Returns the kernels for a model that computes in `dtype` on `device`; None where there are
    none: they compute in float32 on a CPU."""
    if device.type != "cpu" or dtype != torch.float32:
        return None
    return own_kernels()


def _check(status: int) -> None:
    if status:
        raise RunError("there is no memory left for the kernels' scratch space")


def _timed(seconds: list[float], function: Callable[..., int], *arguments: object) -> int:
    start = perf_counter()
    status = function(*arguments)
    seconds.append(perf_counter() - start)
    return status


class Kernels:
    """The functions of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._threads = 0  # as last set; 0: not yet
        functions = library.functions
        self._product = functions.product
        self._rms_norm = functions.rms_norm
        self._rotate_and_write = functions.rotate_and_write
        self._attention = functions.attention
        self._gated = functions.gated
        self._likeliest = functions.likeliest
        self._statistics = functions.statistics
        self._dots = functions.dots
        self._run_branches = functions.run_branches
        self._run_pass = functions.run_pass
        self._grouped_product = functions.grouped_product
        self._weighted_sums = functions.weighted_sums
        self._clamped_gated = functions.clamped_gated

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """Yields a list to which each call of a kernel inside the block adds its seconds."""
        seconds: list[float] = []
        own = vars(self).copy()
        for name, function in own.items():
            if callable(function):
                setattr(self, name, partial(_timed, seconds, function))
        try:
            yield seconds
        finally:
            vars(self).update(own)

    def use_threads(self, threads: int) -> None:
        """Sets how many threads share the work of a call."""
        if threads != self._threads:
            self.library.functions.set_threads(threads)
            self._threads = threads

    def product(self, weight: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x W^T + bias: [n, in] -> [n, out]."""
        output = x.new_empty(x.shape[0], weight.outputs)
        self._into(output, weight, x, bias, 1.0, adds=False)
        return output

    def add_product(
        self, hidden: Tensor, weight: PackedWeight, x: Tensor, bias: Tensor | None, scale: float
    ) -> None:
        """Adds scale * (x W^T + bias) to `hidden` [n, out]."""
        self._into(hidden, weight, x, bias, scale, adds=True)

    def _into(
        self,
        output: Tensor,
        weight: PackedWeight,
        x: Tensor,
        bias: Tensor | None,
        scale: float,
        *,
        adds: bool,
    ) -> None:
        _check(
            self._product(
                weight.address,
                x.data_ptr(),
                x.shape[0],
                x.stride(0),
                None if bias is None else bias.data_ptr(),
                scale,
                adds,
                output.data_ptr(),
                output.stride(0),
            )
        )

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Returns RMSNorm(x) * weight for x [n, width]; `weight` [width], or None for none."""
        output = torch.empty_like(x)
        width = x.shape[1]
        _check(
            self._rms_norm(
                x.data_ptr(),
                x.shape[0],
                x.stride(0),
                1,
                width,
                None if weight is None else weight.data_ptr(),
                0,
                eps,
                output.data_ptr(),
                width,
            )
        )
        return output

    def norm_heads_(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """Applies RMSNorm in place to the first k of `heads` [n, heads, size], each by itself, with
        the weights [k, size]."""
        count, size = weight.shape
        _check(
            self._rms_norm(
                heads.data_ptr(),
                heads.shape[0],
                heads.stride(0),
                count,
                size,
                weight.data_ptr(),
                size,
                eps,
                heads.data_ptr(),
                heads.stride(0),
            )
        )

    def rotate_and_write(
        self,
        heads: Tensor,
        query_heads: int,
        kv_heads: int,
        rotation: Tensor | None,
        entries: Tensor | None,
    ) -> None:
        """Rotates queries and keys in `heads` [n, query, key and value heads, size] in place, and
        copies keys and values of the first m rows to `entries`.

        `rotation` [n, R / 2] is complex64: it turns the first R elements of a head, as pairs of
        neighbours; None: nothing is rotated. `entries` [2, kv heads, m, size] are the keys
        and the values of m slots of a cache; None: nothing is copied.
        """
        rows, _, size = heads.shape
        _check(
            self._rotate_and_write(
                heads.data_ptr(),
                rows,
                heads.stride(0),
                query_heads,
                kv_heads,
                size,
                None if rotation is None else rotation.data_ptr(),
                0 if rotation is None else 2 * rotation.stride(0),
                0 if rotation is None else 2 * rotation.shape[-1],
                0 if entries is None else entries.shape[2],
                None if entries is None else entries[0].data_ptr(),
                None if entries is None else entries[1].data_ptr(),
                0 if entries is None else entries.stride(1),
            )
        )

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: SeenSlots,
        scale: float = 1.0,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns softmax(scale * queries keys^T) values over the slots that each row sees, [n,
        heads * size].

        `queries` [n, heads, size], `keys` and `values` [kv heads, slots, size]. `cap` c limits
        scores to c tanh(score / c); `sinks` [heads] are scores of a key without a value.
        """
        rows, heads, size = queries.shape
        output = queries.new_empty(rows, heads * size)
        _check(
            self._attention(
                queries.data_ptr(),
                rows,
                queries.stride(0),
                heads,
                keys.shape[0],
                size,
                keys.data_ptr(),
                values.data_ptr(),
                keys.stride(0),
                seen.ranges.data_ptr(),
                seen.others.data_ptr(),
                scale,
                cap or 0.0,
                None if sinks is None else sinks.data_ptr(),
                output.data_ptr(),
                heads * size,
            )
        )
        return output

    def gated(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up, [n, 2 * inner] -> [n, inner]: the gates stand first."""
        rows, width = gates_and_ups.shape
        output = gates_and_ups.new_empty(rows, width // 2)
        _check(
            self._gated(
                gates_and_ups.data_ptr(),
                rows,
                gates_and_ups.stride(0),
                width // 2,
                ACTIVATIONS[activation],
                output.data_ptr(),
                width // 2,
            )
        )
        return output

    def likeliest(self, logits: Tensor) -> list[int]:
        """Returns the likeliest token of each row of logits [n, vocabulary], the first of equal
        ones; -1 if the row holds a NaN."""
        rows, count = logits.shape
        tokens = (ctypes.c_int64 * rows)()
        _check(
            self._likeliest(
                logits.data_ptr(), rows, count, logits.stride(0), ctypes.addressof(tokens)
            )
        )
        return list(tokens)

    def statistics(self, logits: Tensor) -> tuple[int, float, float]:
        """Returns the likeliest token of logits [vocabulary], and entropy (nats) and largest
        probability of their softmax; -1 and NaNs if the logits hold a NaN or no finite maximum."""
        found = (ctypes.c_double * 3)()
        _check(self._statistics(logits.data_ptr(), logits.shape[0], ctypes.addressof(found)))
        token, entropy, top_prob = found
        return int(token), entropy, top_prob

    def dots(self, weights: Tensor, x: Tensor) -> list[float]:
        """Returns the products of `x` [width] with the rows of `weights` [n, width], which are
        contiguous. For a few numbers, much of torch's time goes by before it computes."""
        rows, width = weights.shape
        found = (ctypes.c_double * rows)()
        _check(self._dots(weights.data_ptr(), rows, width, x.data_ptr(), ctypes.addressof(found)))
        return list(found)

    def run(
        self,
        program: Program,
        hidden: Tensor,
        kinds: KindTable,
        places: Places,
        first_layer: int,
        slot: int,
    ) -> None:
        """Adds the outputs of a program's branches to `hidden` [n, width], which is contiguous.

        `kinds` are the inputs of the pass. The keys and values of its rows are written to
        `places`, a cache whose first layer has the index `first_layer`, from `slot` on.
        """
        rows, width = hidden.shape
        buffer = hidden.new_empty(rows * (width + program.numbers))
        _check(
            self._run_branches(
                program.address,
                program.count,
                hidden.data_ptr(),
                rows,
                width,
                ctypes.addressof(kinds.addresses),
                kinds.first_row,
                places.address,
                first_layer,
                slot,
                buffer.data_ptr(),
            )
        )

    def run_pass(
        self,
        program: PassProgram,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[SegmentInputs],
        slot: int,
        kept: int,
        known: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a whole pass over n tokens. Returns the states after the layers, and after the final
        norm if there is one, [n, width], and the logits [k, vocabulary] of the last `kept` tokens;
        None with `kept` 0, or without a head.

        `tokens` are ids, or if the program has no table the states [n, width] that enter,
        contiguous. `segments` are the inputs of each of its segments, and the keys and values of
        the tokens are written from `slot` on. `known` are an address and a number m: the first m
        tokens do not run the program's first segment, but begin after it with the states [m, width]
        at this address. A program runs one pass at a time.
        """
        data = program.data
        if isinstance(tokens, Tensor):
            rows = tokens.shape[0]
            data.input = tokens.data_ptr()
            data.known = 0
        else:
            rows = len(tokens)
            if min(tokens) < 0 or max(tokens) >= program.num_tokens:
                raise IndexError(f"token ids {min(tokens)} to {max(tokens)}")
            program.ids[:rows] = list(tokens)
            data.input, data.known = known
        for own, given in zip(program.segments, segments, strict=True):
            own.kinds = ctypes.addressof(given.kinds.addresses)
            own.first_row = given.kinds.first_row
            own.places = given.places.address
            own.first_layer = given.first_layer
            own.tap, own.tap_stride = given.tap or (None, 0)
            own.before = given.before
        states = torch.empty(rows, program.width)
        data.rows = rows
        data.slot = slot
        data.kept = kept
        data.states = states.data_ptr()
        logits: Tensor | None = None
        if kept and program.outputs:
            logits = torch.empty(kept, program.outputs)
            data.logits = logits.data_ptr()
        else:
            data.logits = None
        _check(self._run_pass(program.address))
        return states, logits

    def clamped_gated(self, gates_and_ups: Tensor, limit: float, alpha: float) -> Tensor:
        """Returns (up + 1) * gate * sigmoid(alpha * gate), [n, 2 * inner] -> [n, inner]: the gates
        stand first. Gates are at most `limit`, ups are between -`limit` and `limit`."""
        rows, width = gates_and_ups.shape
        output = gates_and_ups.new_empty(rows, width // 2)
        _check(
            self._clamped_gated(
                gates_and_ups.data_ptr(), rows, width // 2, limit, alpha, output.data_ptr()
            )
        )
        return output

    def grouped_product(self, weight: ExpertsWeight, x: Tensor, ends: Tensor) -> Tensor:
        """Returns x W^T + bias with the weight and the bias of each row's expert, [n, in] -> [n,
        out].

        The rows are sorted by expert; `ends` [experts] has in int64 where those of each one end.
        """
        output = x.new_empty(x.shape[0], weight.outputs)
        _check(
            self._grouped_product(
                weight.address,
                weight.count,
                ends.data_ptr(),
                weight.inputs,
                x.data_ptr(),
                x.stride(0),
                output.data_ptr(),
                output.stride(0),
            )
        )
        return output

    def weighted_sums(self, x: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        """Returns sums of rows of x [m, width], [n, width]: row i of the result sums up the rows
        `positions[i]` [k], in this order, with the weights `weights[i]` [k]. `positions` [n, k] is
        int64; it and `weights` are contiguous."""
        rows, terms = positions.shape
        output = x.new_empty(rows, x.shape[1])
        _check(
            self._weighted_sums(
                x.data_ptr(),
                x.stride(0),
                positions.data_ptr(),
                weights.data_ptr(),
                rows,
                terms,
                x.shape[1],
                output.data_ptr(),
            )
        )
        return output
