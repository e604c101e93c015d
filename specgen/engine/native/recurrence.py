"""The recurrent mixer of a layer: its weights in a model's files, how they are read, and how it
runs. What it keeps of earlier tokens is in `recurrent_states`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Architecture, Recurrent
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import MakeLinear
from specgen.engine.native.recurrent_states import unit_length
from specgen.engine.native.tensors import LinearFiles, Tensor, linear_files, stacked
from specgen.engine.weights import Take


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """The weights that the delta rule alone has: the logarithms of its decay rates and the bias of
    its time steps, each [heads], and the norm of each head's output [value size]."""

    decay_logs: Tensor
    step_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentFiles:
    """The weights of a recurrent mixer in a model's files: names and shapes.

    `inputs` project the input. The weight of `convolution` is [channels, 1, kernel size]. `delta`
    is None where there is a convolution alone.
    """

    inputs: tuple[LinearFiles, ...]
    output: LinearFiles
    convolution: LinearFiles
    delta: DeltaFiles | None


def recurrent_files(architecture: Architecture, index: int) -> RecurrentFiles:
    """Returns names and shapes of the weights of the recurrent mixer of layer `index`."""
    sizes = architecture.recurrent
    assert sizes is not None
    width = architecture.hidden_size
    delta = None
    if architecture.layers[index].mixer == "delta":
        block = f"layers.{index}.linear_attn."
        rows = dict(sizes.projections)
        channels = sizes.channels
        read = sizes.value_heads * sizes.value_size
        convolution = f"{block}conv1d"
        delta = DeltaFiles(
            Tensor(f"{block}A_log", (sizes.value_heads,)),
            Tensor(f"{block}dt_bias", (sizes.value_heads,)),
            Tensor(f"{block}norm.weight", (sizes.value_size,)),
        )
    else:
        block = f"layers.{index}.conv."
        rows = {"": 3 * width}
        channels = width
        read = width
        convolution = f"{block}conv"

    kernel = Tensor(f"{convolution}.weight", (channels, 1, sizes.kernel_size))
    bias = Tensor(f"{convolution}.bias", (channels,)) if sizes.bias else None
    return RecurrentFiles(
        tuple(
            linear_files(f"{block}in_proj{name}", count, width, has_bias=sizes.bias)
            for name, count in rows.items()
        ),
        linear_files(f"{block}out_proj", width, read, has_bias=sizes.bias),
        LinearFiles(kernel, bias),
        delta,
    )


class RecurrentWeights(NamedTuple):
    """The weights of a recurrent mixer. Matrices are [out, in]; `inputs` has the rows of all that
    is projected from the input, and `output` projects to the residual stream.

    `convolution` [channels, kernel size] and `convolution_bias` [channels] are in float32. So are
    the weights of the delta rule, which are None for a convolution alone: `decay_rates` [heads],
    which are negative, `step_bias` [heads], and `norm` [value size], the norm of each head's
    output. A token's decay has the logarithm decay rate * softplus(step + step bias).
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


def read_recurrence(
    files: RecurrentFiles,
    architecture: Architecture,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor | None,
) -> RecurrentWeights:
    """Returns the weights of a recurrent mixer, in `dtype` but for those in float32. `take` returns
    a tensor by name.

    `gain` [width]: the factors of the norm before it, None without one.
    """
    assert architecture.recurrent is not None
    inputs, inputs_bias = stacked(files.inputs, take)
    if architecture.recurrent.by_head:
        inputs = _by_sort(architecture.recurrent, inputs)
    output, output_bias = stacked((files.output,), take)
    convolution, convolution_bias = stacked((files.convolution,), take)
    delta = files.delta
    inputs = inputs if gain is None else inputs.float() * gain
    return RecurrentWeights(
        inputs.to(dtype),
        output.to(dtype),
        None if inputs_bias is None else inputs_bias.to(dtype),
        None if output_bias is None else output_bias.to(dtype),
        convolution[:, 0].float(),
        None if convolution_bias is None else convolution_bias.float(),
        None if delta is None else -take(delta.decay_logs.name).float().exp(),
        None if delta is None else take(delta.step_bias.name).float(),
        None if delta is None else take(delta.norm.name).float(),
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


class RecurrentMixer:
    """Base of the mixers that are no attention: a projection before the recurrence (`qkv`), and one
    after it (`output`).

    `kind` and `is_wide` are arguments that only `Attention` needs.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: RecurrentWeights,
        make_linear: MakeLinear,
        *,
        is_wide: bool = False,
    ) -> None:
        self._index = index
        self._architecture = architecture
        self._weights = weights
        self.qkv = make_linear(weights.inputs, weights.inputs_bias, 1.0)
        self.output = make_linear(weights.output, weights.output_bias, architecture.residual_scale)


class DeltaNet(RecurrentMixer):
    """A gated delta rule after a short convolution (Qwen3-Next). A `Branch`."""

    on_torch = (
        "short convolutions",
        "states of the delta rule",
        "decays and gates of the delta rule",
        "norms of the delta rule's heads",
    )

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        steps, states = inputs.recurrent_inputs
        sizes = self._architecture.recurrent
        weights = self._weights
        assert sizes is not None
        assert weights.decay_rates is not None
        assert weights.step_bias is not None
        heads = sizes.value_heads
        of_keys = sizes.key_heads * sizes.key_size
        of_values = heads * sizes.value_size
        mixed, gate, beta, step = self.qkv(x).split_with_sizes(
            (sizes.channels, of_values, heads, heads), 1
        )
        mixed = functional.silu(states.convs[self._index](steps, mixed, weights.convolution))
        query, key, value = mixed.split_with_sizes((of_keys, of_keys, of_values), 1)
        query = unit_length(query.view(-1, sizes.key_heads, sizes.key_size)) * sizes.key_size**-0.5
        key = unit_length(key.view(-1, sizes.key_heads, sizes.key_size))
        value = value.view(-1, heads, sizes.value_size)
        decay = weights.decay_rates * functional.softplus(step.float() + weights.step_bias)
        read = states.states[self._index](
            steps, query, key, value, decay[..., None], beta.float().sigmoid()
        )
        normed = functional.rms_norm(
            read, (sizes.value_size,), weights.norm, self._architecture.norm_eps
        ).flatten(1)
        return (normed * functional.silu(gate.float())).to(x.dtype)


class ShortConv(RecurrentMixer):
    """A short convolution with gates on its input and its output (LFM2). A `Branch`."""

    on_torch = ("short convolutions", "gates of short convolutions")

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        steps, states = inputs.recurrent_inputs
        before, after, values = self.qkv(x).chunk(3, 1)
        weights = self._weights
        convolved = states.convs[self._index](
            steps, before * values, weights.convolution, weights.convolution_bias
        )
        return convolved.to(x.dtype) * after
