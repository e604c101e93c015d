"""The attention of a layer: its weights in a model's files, how they are read, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.kernels.branches import BranchNorms, HeadOptions, KernelBranch
from specgen.engine.kernels.operators import Kernels
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attend import attend, attend_batch
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import MakeLinear, kernel_runs
from specgen.engine.native.rotary import rotate
from specgen.engine.native.tensors import LinearFiles, Tensor, Unit, linear_files, scaled, stacked
from specgen.engine.weights import Take


@dataclass(frozen=True, slots=True)
class AttentionFiles:
    """The weights of an attention in a model's files.

    `projections` are those of queries, keys and values, or one with the rows of all in this order.
    Without keys of its own, a layer has queries alone. `q_norm` and `k_norm` are the weights of the
    norms of queries and keys, `sinks` the logits of sinks; None: there are none.
    """

    projections: tuple[LinearFiles, ...]
    output: LinearFiles
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None


def attention_files(architecture: Architecture, index: int) -> AttentionFiles:
    """Returns the weights of the attention of layer `index`, whose sizes `architecture` has (see
    `Architecture.of_layer`)."""
    block = f"layers.{index}.self_attn."
    kind = architecture.layers[index]
    has_keys = kind.owner is None
    width = architecture.hidden_size
    size = architecture.head_size
    heads = architecture.num_heads
    kv_heads = architecture.num_kv_heads

    def projection(name: str, rows: int, *units: Unit) -> LinearFiles:
        has_bias = architecture.qkv_bias
        return linear_files(
            f"{block}{name}", rows, width, has_bias=has_bias, split="rows", units=units
        )

    def norm(name: str, count: int, unit: Unit) -> Tensor | None:
        if architecture.qk_norm is None:
            return None
        if architecture.qk_norm == "all":
            return Tensor(f"{block}{name}.weight", (count * size,), "rows", (unit,))
        return Tensor(f"{block}{name}.weight", (size,))

    projections: tuple[LinearFiles, ...]
    if architecture.fused_projections:
        rows = (heads + 2 * kv_heads) * size
        projections = (projection("qkv_proj", rows, "heads", "kv_heads", "kv_heads"),)
    else:
        query_rows = heads * size * (2 if architecture.gated_attention else 1)
        query = projection("q_proj", query_rows, "heads")
        key = projection("k_proj", kv_heads * size, "kv_heads")
        value = projection("v_proj", kv_heads * size, "kv_heads")
        if architecture.shared_projection and kind.window is None:
            value = key
        projections = (query, key, value) if has_keys else (query,)

    return AttentionFiles(
        projections,
        linear_files(
            f"{block}o_proj",
            width,
            heads * size,
            has_bias=architecture.output_bias,
            split="columns",
            units=("heads",),
        ),
        norm("q_norm", heads, "heads"),
        norm("k_norm", kv_heads, "kv_heads") if has_keys else None,
        Tensor(f"{block}sinks", (heads,), "rows", ("heads",)) if architecture.sinks else None,
    )


class AttentionWeights(NamedTuple):
    """The weights of an attention. Matrices are [out, in]; `qkv` has the rows of all query heads,
    then key heads, then value heads, then gates, if there are any.

    `qk_norm` [n, head size] has the weights of the norms of the first n heads, of queries and keys,
    or of values too; None: there are none. `score_scale` is the factor of the scores that is not
    part of the weights.
    """

    qkv: torch.Tensor
    output: torch.Tensor
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    score_scale: float = 1.0


def read_attention(
    files: AttentionFiles,
    architecture: Architecture,
    take: Take,
    dtype: torch.dtype | None,
    gain: torch.Tensor | None,
    take_matrix: Take | None = None,
) -> AttentionWeights:
    """Returns the attention's weights in `dtype`. `architecture` is that of the layer.

    `take` returns a tensor by name. `gain` [width]: the factors of the norm before it, None without
    one. `dtype` None: matrices stay as `take_matrix` returns them, without a factor, and all else
    is in float32.
    """
    qkv, qkv_bias = stacked(files.projections, take, take_matrix)
    if architecture.gated_attention:
        qkv = _with_gates_last(architecture, qkv)
        qkv_bias = None if qkv_bias is None else _with_gates_last(architecture, qkv_bias)
    score_scale = 1.0
    if architecture.qk_norm is None:
        score_scale = architecture.attention_scale
    query_scale = 1.0
    if dtype is not None:
        qkv = qkv.float()  # rounded once, after all factors
        query_scale, score_scale = score_scale, 1.0
    qkv = _arranged(architecture, qkv, query_scale)
    if qkv_bias is not None:
        qkv_bias = _arranged(architecture, qkv_bias.float()[:, None], query_scale)[:, 0]
    if gain is not None:
        qkv = scaled(qkv, gain)
    output, output_bias = stacked((files.output,), take, take_matrix)
    qk_norm = None
    if files.q_norm is not None:
        size = architecture.head_size
        kv_heads = architecture.num_kv_heads
        norms = [
            take(norm.name).float() + architecture.norm_weight_offset
            for norm in (files.q_norm, files.k_norm)
            if norm is not None
        ]
        counts = [1, 1] if architecture.qk_norm == "all" else [architecture.num_heads, kv_heads]
        norms = [
            norm.view(-1, size).repeat(count, 1) for norm, count in zip(norms, counts, strict=False)
        ]
        norms[0] *= architecture.attention_scale
        qk_norm = torch.cat(norms)[:, head_order(architecture, norms[0].device)]
        if architecture.qk_norm == "values":
            qk_norm = torch.cat((qk_norm, qk_norm.new_ones(kv_heads, size)))
    sinks = None if files.sinks is None else take(files.sinks.name)
    qkv_bias, output_bias, qk_norm, sinks = (
        None if weight is None else weight.to(dtype or torch.float32)
        for weight in (qkv_bias, output_bias, qk_norm, sinks)
    )
    if dtype is not None:
        qkv = qkv.to(dtype)
        output = output.to(dtype)
    return AttentionWeights(qkv, output, qkv_bias, output_bias, qk_norm, sinks, score_scale)


def _with_gates_last(architecture: Architecture, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of queries, keys, values and gates. In the files, the rows of a head's gate
    follow those of its query."""
    count = 2 * architecture.num_heads * architecture.head_size
    queries = rows[:count]
    others = rows[count:]
    of_heads = queries.view(architecture.num_heads, 2, architecture.head_size, *rows.shape[1:])
    return torch.cat((of_heads[:, 0].flatten(0, 1), others, of_heads[:, 1].flatten(0, 1)))


def _arranged(architecture: Architecture, rows: torch.Tensor, query_scale: float) -> torch.Tensor:
    """Returns the rows of queries, keys and values with the queries times `query_scale`, and rotary
    pairs as neighbours."""
    heads = architecture.num_heads
    size = architecture.head_size
    columns = rows.shape[1]
    rotated = (heads + architecture.num_kv_heads) * size
    parts = rows[:rotated].view(-1, size, columns)[:, head_order(architecture, rows.device)]
    if query_scale != 1.0:
        parts = torch.cat((parts[:heads] * query_scale, parts[heads:]))
    return torch.cat((parts.reshape(rotated, columns), rows[rotated:]))


def head_order(architecture: Architecture, device: torch.device) -> torch.Tensor:
    """Returns the order of the elements of a query or key head in the native decoder: for each, its
    index in the model's files.

    Pairs that are rotated together are neighbours here, and rotary size / 2 apart in the files.
    """
    order = torch.arange(architecture.head_size, device=device)
    if any(kind.rotary is not None for kind in architecture.layers):
        order[: architecture.rotary_size] = (
            order[: architecture.rotary_size].view(2, -1).t().reshape(-1)
        )
    return order


class Attention:
    """Attention of grouped heads. A `Branch`.

    `kind` is the index of the layer's inputs in `PassInputs.kinds`. `is_wide`: computes in float64
    and rounds to float32. Then a token's result does not depend on the order of the keys (in draft
    trees) or on the other tokens of the pass. Needed before products that round activations to few
    bits, in which tiny differences would grow.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: AttentionWeights,
        make_linear: MakeLinear,
        *,
        is_wide: bool = False,
    ) -> None:
        self._index = index
        self._kind = kind
        self._kernels = make_linear.kernels
        self._is_wide = is_wide
        self._scale = weights.score_scale
        self._heads = architecture.num_heads
        self._kv_heads = architecture.num_kv_heads
        self._size = architecture.head_size
        self._score_cap = architecture.score_cap
        self._eps = architecture.norm_eps
        self._qk_norm = weights.qk_norm
        self._norm_over = architecture.qk_norm
        self._sinks = weights.sinks
        self._is_gated = architecture.gated_attention
        self.qkv = make_linear(weights.qkv, weights.qkv_bias, 1.0)
        self.output = make_linear(weights.output, weights.output_bias, architecture.residual_scale)

    @property
    def on_torch(self) -> tuple[str, ...]:
        return ("gates of attention",) if self._is_gated else ()

    def for_kernels(self, norms: BranchNorms, scale: float) -> KernelBranch | None:
        """Returns this attention, with the norms around it, as kernels run it in one call with its
        neighbours; None where they cannot. `scale` is the factor of its output on the residual
        stream."""
        runs = kernel_runs(self.qkv, self.output)
        if runs is None or self._is_gated:
            return None
        options = HeadOptions(
            self._index,
            self._kind,
            self._heads,
            self._kv_heads,
            self._size,
            self._qk_norm,
            self._norm_over == "all",
            self._scale,
            self._score_cap,
            self._sinks,
        )
        return KernelBranch(runs, norms, scale, heads=options)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self._size)
        if not self._is_gated:
            return self._attended(heads, inputs)
        heads, gates = heads.split_with_sizes((self._heads + 2 * self._kv_heads, self._heads), 1)
        return self._attended(heads, inputs) * gates.flatten(1).sigmoid()

    def _attended(self, heads: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns the output [batch * rows, heads * head size] for queries, keys and values [batch
        * rows, all heads, ...]."""
        if self._qk_norm is not None:
            heads = self.normed_heads(heads, self._qk_norm)
        rotation, mask, entries, seen = inputs.kinds[self._kind]
        if self._kernels is not None and seen is not None:
            return self._attended_by_kernels(self._kernels, heads, inputs)
        if rotation is not None:
            rotate(heads.narrow(1, 0, self._heads + self._kv_heads), rotation)
        if inputs.batch is not None:
            return self._batch_attention(heads, inputs)
        query, new = heads.split_with_sizes((self._heads, 2 * self._kv_heads), 1)
        if entries is None:
            keys, values = torch.split(new.transpose(0, 1), self._kv_heads)
        else:
            written, keys, values = entries[self._index - inputs.first_layer]
        # otherwise another layer writes the keys and values that this one reads
        if entries is not None and self._kv_heads:
            if inputs.written != inputs.rows:
                new = new.narrow(0, 0, inputs.written)
            new = new.view(-1, 2, self._kv_heads, self._size).permute(1, 2, 0, 3)
            if inputs.slots is None:
                written.copy_(new)
            else:
                written.index_copy_(2, inputs.slots, new)
        if self._scale != 1.0:
            query = query * self._scale
        if self._is_wide:
            query = query.double()
            keys = keys.double()
            values = values.double()
            mask = mask if mask is None else mask.double()
        return attend(
            query, keys, values, mask, self._score_cap, self._sinks, fused=inputs.fused
        ).to(heads.dtype)

    def _attended_by_kernels(
        self, kernels: Kernels, heads: torch.Tensor, inputs: PassInputs
    ) -> torch.Tensor:
        """Returns what `_attended` does, for queries, keys and values after their norms."""
        rotation, _, entries, seen = inputs.kinds[self._kind]
        assert entries is not None
        assert seen is not None
        written, keys, values = entries[self._index - inputs.first_layer]
        kernels.rotate_and_write(
            heads,
            self._heads,
            self._kv_heads,
            None if rotation is None else rotation[:, 0],
            written if self._kv_heads else None,  # else another layer writes what this one reads
        )
        return kernels.attention(
            heads[:, : self._heads], keys, values, seen, self._scale, self._score_cap, self._sinks
        )

    def _batch_attention(self, heads: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns what a call does, for several sequences. `heads` is [batch * rows, all heads,
        head size]."""
        _, mask, entries, _ = inputs.kinds[self._kind]
        assert inputs.batch is not None
        assert mask is not None
        heads = heads.view(inputs.batch, inputs.rows, *heads.shape[1:])
        query, keys, values = torch.split(
            heads, [self._heads, self._kv_heads, self._kv_heads], dim=2
        )
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        if self._scale != 1.0:
            query = query * self._scale
        if entries is not None:
            written, all_keys, all_values = entries[self._index - inputs.first_layer]
            if self._kv_heads:
                written.view(2, *keys.shape).copy_(torch.stack((keys, values)))
            keys, values = (
                part.view(inputs.batch, -1, *part.shape[1:]) for part in (all_keys, all_values)
            )
        return attend_batch(query, keys, values, mask, self._score_cap, self._sinks).flatten(0, 1)

    def _norm_by_kernels(self, kernels: Kernels, heads: torch.Tensor, weight: torch.Tensor) -> None:
        """Does what `normed_heads` does, in place."""
        if self._norm_over != "all":
            kernels.norm_heads_(heads, weight, self._eps)
            return
        first = 0
        for count in (self._heads, self._kv_heads):
            last = first + count
            joined = heads[:, first:last].view(len(heads), 1, -1)  # one head of the size of all
            kernels.norm_heads_(joined, weight[first:last].view(1, -1), self._eps)
            first = last

    def normed_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the heads with query and key heads normalised (Qwen 3, Gemma 3, OLMo 2), or value
        heads too (Gemma 4)."""
        if self._kernels is not None:
            self._norm_by_kernels(self._kernels, heads, weight)
            return heads
        part = heads.narrow(1, 0, weight.shape[0])
        if self._norm_over != "all":
            normed = functional.rms_norm(part, part.shape[-1:], None, self._eps)
        else:  # over all query heads at once, and over all key heads
            both = torch.split(part, [self._heads, self._kv_heads], dim=1)
            normed = torch.cat(
                [functional.rms_norm(one, one.shape[-2:], None, self._eps) for one in both], dim=1
            )
        if torch.is_grad_enabled():
            return torch.cat((normed * weight, heads[:, weight.shape[0] :]), dim=1)
        torch.mul(normed, weight, out=part)
        return heads
