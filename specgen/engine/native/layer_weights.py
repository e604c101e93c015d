"""The tensors of a model's files by layer, and the weights that the native decoder makes of them.

Matrices that read the same input are fused, with the weights of the norm before them and the score
scale folded in. All operations can be differentiated, so an exit layer is trained through them.
Names have no prefix `model.`, which most files have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from specgen.engine.native.architecture import Architecture, Recurrent
from specgen.engine.native.mlp import (
    ExpertWeights,
    MLPWeights,
    expert_shapes,
    expert_weights,
    scaled,
    stacked,
)
from specgen.engine.weights import Take, bias_of

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"
EXIT_HEAD = "head.weight"  # the name of an exit layer's own LM head in its file

_PER_LAYER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
_BLOCKS = {"delta": "linear_attn.", "conv": "conv."}  # of recurrent mixers


class LayerTensors(NamedTuple):
    """The names of one layer's weights in a model's files. The bias of a weight is called
    `bias_of(name)`.

    `attention_norm` and `mlp_norm` are the norms of the input of attention and MLP,
    `attention_post_norm` and `mlp_post_norm` those of their output; None: there is no such norm.
    `qkv` names the weights of queries, keys and values, or one weight with all their rows in this
    order (without keys of its own, a layer has queries alone); `gate_up` those of gate and up
    projection, or one with the rows of both. `scalar` is the factor of the layer's output.
    `per_layer` names the weights `LayerWeights.per_layer`.
    """

    attention_norm: str | None
    mlp_norm: str | None
    attention_post_norm: str | None
    mlp_post_norm: str | None
    qkv: tuple[str, ...]
    q_norm: str | None
    k_norm: str | None
    sinks: str | None
    output: str
    gate_up: tuple[str, ...]
    down: str
    scalar: str | None
    per_layer: tuple[str, ...]


class AttentionWeights(NamedTuple):
    """The weights of an attention. Matrices are [out, in]; `qkv` has the rows of all query heads,
    then key heads, then value heads, then gates, if there are any.

    `qk_norm` [n, head size] has the weights of the norms of the first n heads, of queries and keys,
    or of values too; None: there are none.
    """

    qkv: torch.Tensor
    output: torch.Tensor
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None


class RecurrentWeights(NamedTuple):
    """The weights of a recurrent mixer. Matrices are [out, in]; `inputs` has the rows of all that
    is projected from the input.

    `convolution` is [channels, kernel size]. Those of the delta rule alone are in float32:
    `decay_rates` [heads], the negative factors of the logarithms of decays, the bias of their time
    steps `step_bias` [heads], and the weights of the norm of each head's output, `norm` [value
    size].
    """

    inputs: torch.Tensor
    output: torch.Tensor
    inputs_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    convolution: torch.Tensor
    convolution_bias: torch.Tensor | None
    decay_rates: torch.Tensor | None
    step_bias: torch.Tensor | None
    norm: torch.Tensor | None


class LayerWeights(NamedTuple):
    """The weights of one layer: those of its mixer, those of its MLP, and the norms of their
    outputs (None: there are none).

    `per_layer` are the weights `gate` [size of e, width], `projection` [width, size of e] and
    `norm` [width] that add the layer's own embedding e of the token to its output x: x + norm
    RMSNorm(projection (act(gate x) e)). Empty: the layer has no such embedding. `scalar` is the
    factor of the layer's output.
    """

    mixer: AttentionWeights | RecurrentWeights
    mlp: MLPWeights | ExpertWeights
    attention_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    per_layer: Sequence[torch.Tensor] = ()
    scalar: float = 1.0


def layer_tensors(architecture: Architecture, index: int) -> LayerTensors:
    """Returns the names of the weights of layer `index`."""
    layer = f"layers.{index}."
    attention = f"{layer}self_attn."
    mlp = f"{layer}mlp."
    pre = architecture.pre_norms
    post = architecture.post_norms
    is_fused = architecture.fused_projections
    mlp_norm = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    qkv = tuple(
        f"{attention}{name}_proj.weight" for name in (("qkv",) if is_fused else ("q", "k", "v"))
    )
    output = "o_proj"
    kind = architecture.layers[index]
    mixer = kind.mixer
    has_keys = kind.owner is None
    if architecture.shared_projection and kind.window is None:
        qkv = *qkv[:2], qkv[1]
    if architecture.recurrent is not None and mixer != "attention":
        attention = f"{layer}{_BLOCKS[mixer]}"
        output = "out_proj"
        projected = architecture.recurrent.projections if mixer == "delta" else ("",)
        qkv = tuple(f"{attention}in_proj{name}.weight" for name in projected)
    has_qk_norm = architecture.qk_norm is not None and mixer == "attention"
    return LayerTensors(
        attention_norm=f"{layer}input_layernorm.weight" if pre else None,
        mlp_norm=f"{layer}{mlp_norm}.weight" if pre else None,
        attention_post_norm=f"{layer}post_attention_layernorm.weight" if post else None,
        mlp_post_norm=f"{layer}post_feedforward_layernorm.weight" if post else None,
        qkv=qkv if has_keys else qkv[:1],
        q_norm=f"{attention}q_norm.weight" if has_qk_norm else None,
        k_norm=f"{attention}k_norm.weight" if has_qk_norm and has_keys else None,
        sinks=f"{attention}sinks" if architecture.sinks else None,
        output=f"{attention}{output}.weight",
        gate_up=tuple(
            f"{mlp}{name}_proj.weight" for name in (("gate_up",) if is_fused else ("gate", "up"))
        ),
        down=f"{mlp}down_proj.weight",
        scalar=f"{layer}layer_scalar" if architecture.layer_scalars else None,
        per_layer=tuple(f"{layer}{name}.weight" for name in _PER_LAYER)
        if architecture.per_layer_size
        else (),
    )


def layer_shapes(architecture: Architecture, index: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of layer `index` by name, biases included."""
    architecture = architecture.of_layer(index)
    names = layer_tensors(architecture, index)
    width = architecture.hidden_size
    inner = architecture.intermediate_size
    heads, kv_heads = (
        count * architecture.head_size
        for count in (architecture.num_heads, architecture.num_kv_heads)
    )
    query_rows = heads * (2 if architecture.gated_attention else 1)
    qkv_rows: tuple[int, ...] = (
        (heads + 2 * kv_heads,) if len(names.qkv) == 1 else (query_rows, kv_heads, kv_heads)
    )
    read = heads
    mixer_bias = architecture.qkv_bias
    output_bias = architecture.output_bias
    inner_rows = (2 * inner,) if len(names.gate_up) == 1 else (inner, inner)
    mlp_bias = architecture.mlp_bias
    mlp = (names.gate_up, inner_rows, width, mlp_bias), ((names.down,), (width,), inner, mlp_bias)
    shapes: dict[str, tuple[int, ...]] = {}
    if architecture.layers[index].mixer != "attention":
        recurrent = architecture.recurrent
        assert recurrent is not None
        convolution = _convolution(architecture, index)
        read = width
        channels = width
        mixer_bias = recurrent.bias
        output_bias = recurrent.bias
        qkv_rows = (3 * width,)
        if architecture.layers[index].mixer == "delta":
            channels = recurrent.channels
            read = recurrent.value_heads * recurrent.value_size
            qkv_rows = tuple(recurrent.projections.values())
            block = names.output.removesuffix("out_proj.weight")
            shapes |= {f"{block}{name}": (recurrent.value_heads,) for name in ("A_log", "dt_bias")}
            shapes[f"{block}norm.weight"] = (recurrent.value_size,)
        shapes[convolution] = (channels, 1, recurrent.kernel_size)
        if recurrent.bias:
            shapes[bias_of(convolution)] = (channels,)
    if is_mixture := architecture.layers[index].mlp == "experts":
        shapes |= expert_shapes(architecture, index)
    if names.sinks is not None:
        shapes[names.sinks] = (architecture.num_heads,)
    for products, rows, columns, has_bias in (
        (names.qkv, qkv_rows, width, mixer_bias),
        ((names.output,), (width,), read, output_bias),
        *(() if is_mixture else mlp),
    ):
        shapes |= {name: (count, columns) for name, count in zip(products, rows, strict=True)}
        if has_bias:
            shapes |= {bias_of(name): (count,) for name, count in zip(products, rows, strict=True)}
    if names.scalar is not None:
        shapes[names.scalar] = (1,)
    if size := architecture.per_layer_size:
        shapes |= zip(names.per_layer, ((size, width), (width, size), (width,)), strict=True)
    norms = names.attention_norm, names.mlp_norm, names.attention_post_norm, names.mlp_post_norm
    shapes |= {name: (width,) for name in norms if name is not None}
    for norm, size in ((names.q_norm, heads), (names.k_norm, kv_heads)):
        if norm is not None:
            shapes[norm] = (size if architecture.qk_norm == "all" else architecture.head_size,)
    return shapes


def layer_weights(
    architecture: Architecture,
    index: int,
    take: Take,
    dtype: torch.dtype,
    gain: float = 1.0,
    *,
    is_normed: bool = True,
) -> LayerWeights:
    """Returns the weights of layer `index` in `dtype`, with norms and scales folded in.

    `take` returns a tensor of the model by name. `gain` is a factor on the weights of the norms
    before attention and MLP (see `layer.norm_gain`). `is_normed` False: the attention's input has
    no norm.
    """
    architecture = architecture.of_layer(index)
    names = layer_tensors(architecture, index)

    def norm(name: str | None) -> torch.Tensor | None:
        return None if name is None else take(name).float() + architecture.norm_weight_offset

    before = norm(names.attention_norm if is_normed else None), norm(names.mlp_norm)
    attention_gain, mlp_gain = (None if weight is None else weight * gain for weight in before)
    if architecture.layers[index].mlp == "dense":
        mlp: MLPWeights | ExpertWeights = _mlp_weights(architecture, names, take, dtype, mlp_gain)
    else:
        assert mlp_gain is not None
        mlp = expert_weights(architecture, index, take, dtype, mlp_gain, gain)
    after = norm(names.attention_post_norm), norm(names.mlp_post_norm)
    own = [take(name).to(dtype) for name in names.per_layer]
    make_mixer = (
        _attention_weights
        if architecture.layers[index].mixer == "attention"
        else partial(_recurrent_weights, index)
    )
    return LayerWeights(
        make_mixer(architecture, names, take, dtype, attention_gain),
        mlp,
        None if after[0] is None else after[0].to(dtype),
        None if after[1] is None else after[1].to(dtype),
        own,
        1.0 if names.scalar is None else float(take(names.scalar).to(dtype)),
    )


def _attention_weights(
    architecture: Architecture,
    names: LayerTensors,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor | None,
) -> AttentionWeights:
    """Returns the attention's weights. `gain` [width]: the factors of the norm before it, None
    without one."""
    qkv, qkv_bias = stacked(names.qkv, take, architecture.qkv_bias)
    if architecture.gated_attention:
        qkv = _with_gates_last(architecture, qkv)
        qkv_bias = None if qkv_bias is None else _with_gates_last(architecture, qkv_bias)
    qkv = _arranged(architecture, qkv.float())  # float32: rounded once, after all factors
    if qkv_bias is not None:
        qkv_bias = _arranged(architecture, qkv_bias.float()[:, None])[:, 0]
    if gain is not None:
        qkv = scaled(qkv, gain)
    output, output_bias = stacked((names.output,), take, architecture.output_bias)
    qk_norm = None
    if names.q_norm is not None:
        size = architecture.head_size
        kv_heads = architecture.num_kv_heads
        norms = [
            take(name).float() + architecture.norm_weight_offset
            for name in (names.q_norm, names.k_norm)
            if name is not None
        ]
        counts = [1, 1] if architecture.qk_norm == "all" else [architecture.num_heads, kv_heads]
        norms = [
            norm.view(-1, size).repeat(count, 1) for norm, count in zip(norms, counts, strict=False)
        ]
        norms[0] *= architecture.attention_scale
        qk_norm = torch.cat(norms)[:, head_order(architecture, norms[0].device)]
        if architecture.qk_norm == "values":
            qk_norm = torch.cat((qk_norm, qk_norm.new_ones(kv_heads, size)))
    sinks = None if names.sinks is None else take(names.sinks)
    optional = (
        None if part is None else part.to(dtype) for part in (qkv_bias, output_bias, qk_norm, sinks)
    )
    return AttentionWeights(qkv.to(dtype), output.to(dtype), *optional)


def _recurrent_weights(
    index: int,
    architecture: Architecture,
    names: LayerTensors,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor | None,
) -> RecurrentWeights:
    """Returns the weights of a recurrent mixer. `gain`: see `_attention_weights`."""
    assert architecture.recurrent is not None
    bias = architecture.recurrent.bias
    inputs, inputs_bias = stacked(names.qkv, take, bias)
    if architecture.recurrent.by_head:
        inputs = _by_sort(architecture.recurrent, inputs)
    output, output_bias = stacked((names.output,), take, bias)
    convolution = _convolution(architecture, index)
    rates = step_bias = norm = None
    if architecture.layers[index].mixer == "delta":
        block = names.output.removesuffix("out_proj.weight")
        rates = -take(f"{block}A_log").float().exp()
        step_bias = take(f"{block}dt_bias").float()
        norm = take(f"{block}norm.weight").float()
    inputs = inputs if gain is None else inputs.float() * gain
    return RecurrentWeights(
        inputs.to(dtype),
        output.to(dtype),
        None if inputs_bias is None else inputs_bias.to(dtype),
        None if output_bias is None else output_bias.to(dtype),
        take(convolution)[:, 0].float(),
        take(bias_of(convolution)).float() if bias else None,
        rates,
        step_bias,
        norm,
    )


def _by_sort(sizes: Recurrent, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all queries, keys, values, output gates, update gates and steps, which in
    the files stand by key head: the first four sorts, then the last two."""
    values = sizes.value_heads // sizes.key_heads
    wide, narrow = rows.tensor_split([len(rows) - 2 * sizes.value_heads])
    of_heads = wide.view(sizes.key_heads, -1, rows.shape[1])
    of_values = values * sizes.value_size
    parts = of_heads.split_with_sizes((sizes.key_size, sizes.key_size, of_values, of_values), 1)
    gates = narrow.view(sizes.key_heads, 2, values, -1).unbind(1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *gates)])


def _convolution(architecture: Architecture, index: int) -> str:
    """Returns the name of the weight of a recurrent layer's convolution."""
    mixer = architecture.layers[index].mixer
    return f"layers.{index}.{_BLOCKS[mixer]}{'conv1d' if mixer == 'delta' else 'conv'}.weight"


def _mlp_weights(
    architecture: Architecture,
    names: LayerTensors,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor | None,
) -> MLPWeights:
    """Returns the MLP's weights. `gain`: see `_attention_weights`."""
    gate_up, gate_up_bias = stacked(names.gate_up, take, architecture.mlp_bias)
    down, down_bias = stacked((names.down,), take, architecture.mlp_bias)
    if gain is not None:
        is_copy = len(names.gate_up) > 1
        gate_up = scaled(gate_up, gain) if is_copy else gate_up * gain
    biases = (None if bias is None else bias.to(dtype) for bias in (gate_up_bias, down_bias))
    return MLPWeights(gate_up.to(dtype), down.to(dtype), *biases)


def _with_gates_last(architecture: Architecture, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of queries, keys, values and gates. In the files, the rows of a head's gate
    follow those of its query."""
    count = 2 * architecture.num_heads * architecture.head_size
    queries = rows[:count]
    others = rows[count:]
    of_heads = queries.view(architecture.num_heads, 2, architecture.head_size, *rows.shape[1:])
    return torch.cat((of_heads[:, 0].flatten(0, 1), others, of_heads[:, 1].flatten(0, 1)))


def _arranged(architecture: Architecture, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of queries, keys and values with the queries scaled, unless a norm follows,
    and rotary pairs as neighbours."""
    heads = architecture.num_heads
    size = architecture.head_size
    columns = rows.shape[1]
    rotated = (heads + architecture.num_kv_heads) * size
    parts = rows[:rotated].view(-1, size, columns)[:, head_order(architecture, rows.device)]
    if architecture.qk_norm is None and architecture.attention_scale != 1.0:
        parts = torch.cat((parts[:heads] * architecture.attention_scale, parts[heads:]))
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


def final_norm(
    architecture: Architecture, take: Take, dtype: torch.dtype, gain: float = 1.0
) -> torch.Tensor:
    """Returns the weight [width] of the norm before the LM head, multiplied by `gain` (see
    `layer.norm_gain`)."""
    return ((take(FINAL_NORM).float() + architecture.norm_weight_offset) * gain).to(dtype)
