"""The recurrent mixer of a layer: its weights in a model's files, how they are read, and how it
runs. What it keeps of earlier tokens is in `recurrent_states`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Architecture, Recurrent
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import MakeLinear, unrounded
from specgen.engine.native.norms import rms_norm
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

    `inputs` project the input; `steps` project it to the delta rule's update gates and time steps,
    one each for a head. The weight of `convolution` is [channels, 1, kernel size]. `delta` is None,
    and `steps` are empty, where there is a convolution alone.
    """

    inputs: tuple[LinearFiles, ...]
    steps: tuple[LinearFiles, ...]
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
        of_steps = dict(sizes.step_projections)
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
        of_steps = {}
        channels = width
        read = width
        convolution = f"{block}conv"

    kernel = Tensor(f"{convolution}.weight", (channels, 1, sizes.kernel_size))
    bias = Tensor(f"{convolution}.bias", (channels,)) if sizes.bias else None
    inputs, steps = (
        tuple(
            linear_files(f"{block}in_proj{name}", count, width, has_bias=sizes.bias)
            for name, count in counts.items()
        )
        for counts in (rows, of_steps)
    )
    return RecurrentFiles(
        inputs,
        steps,
        linear_files(f"{block}out_proj", width, read, has_bias=sizes.bias),
        LinearFiles(kernel, bias),
        delta,
    )


class RecurrentWeights(NamedTuple):
    """The weights of a recurrent mixer. Matrices are [out, in]; `inputs` has the rows of all that
    is projected from the input but for `steps`, and `output` projects to the residual stream.

    `steps` [2 heads, width], with the bias `steps_bias`, has the rows of all heads' update gates,
    then of their time steps, None for a convolution alone. Its outputs decide how fast a state
    forgets, so it is never rounded.

    `convolution` [channels, kernel size] and `convolution_bias` [channels] are in float32. So are
    the weights of the delta rule, which are None for a convolution alone: `decay_rates` [heads],
    which are negative, `step_bias` [heads], and `norm` [value size], the norm of each head's
    output. A token's decay has the logarithm decay rate * softplus(step + step bias).
    """

    inputs: torch.Tensor
    output: torch.Tensor
    steps: torch.Tensor | None
    inputs_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    steps_bias: torch.Tensor | None
    convolution: torch.Tensor
    convolution_bias: torch.Tensor | None
    decay_rates: torch.Tensor | None
    step_bias: torch.Tensor | None
    norm: torch.Tensor | None


def read_recurrence(
    files: RecurrentFiles,
    architecture: Architecture,
    take: Take,
    dtype: torch.dtype | None,
    gain: torch.Tensor | None,
    take_matrix: Take | None = None,
) -> RecurrentWeights:
    """Returns the weights of a recurrent mixer, in `dtype` but for those in float32. `take` returns
    a tensor by name.

    `gain` [width]: the factors of the norm before it, None without one. `dtype` None: matrices stay
    as `take_matrix` returns them, `steps` as `take` does, and biases are in float32.
    """
    sizes = architecture.recurrent
    assert sizes is not None
    inputs, inputs_bias = stacked(files.inputs, take, take_matrix)
    output, output_bias = stacked((files.output,), take, take_matrix)
    steps = steps_bias = None
    if files.steps:
        steps, steps_bias = stacked(files.steps, take)
        if sizes.by_head:
            inputs = _by_sort(sizes, inputs)
            steps = _gates_first(sizes, steps)
    convolution, convolution_bias = stacked((files.convolution,), take)
    if gain is not None:
        inputs = inputs.float() * gain
        steps = None if steps is None else steps.float() * gain
    if dtype is not None:
        inputs = inputs.to(dtype)
        output = output.to(dtype)
        steps = None if steps is None else steps.to(dtype)
    inputs_bias, output_bias, steps_bias = (
        None if bias is None else bias.to(dtype or torch.float32)
        for bias in (inputs_bias, output_bias, steps_bias)
    )
    delta = files.delta
    return RecurrentWeights(
        inputs,
        output,
        steps,
        inputs_bias,
        output_bias,
        steps_bias,
        convolution[:, 0].float(),
        None if convolution_bias is None else convolution_bias.float(),
        None if delta is None else -take(delta.decay_logs.name).float().exp(),
        None if delta is None else take(delta.step_bias.name).float(),
        None if delta is None else take(delta.norm.name).float(),
    )


def _by_sort(sizes: Recurrent, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all queries, keys, values and output gates, which in the files stand by
    key head."""
    of_heads = rows.view(sizes.key_heads, -1, rows.shape[1])
    of_values = sizes.value_heads // sizes.key_heads * sizes.value_size
    parts = of_heads.split_with_sizes((sizes.key_size, sizes.key_size, of_values, of_values), 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _gates_first(sizes: Recurrent, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all update gates, then of all time steps, which in the files stand by key
    head."""
    of_heads = rows.view(sizes.key_heads, 2, -1, rows.shape[1])
    return of_heads.transpose(0, 1).reshape(rows.shape)


class RecurrentMixer:
    """Base of the mixers that are no attention: a projection before the recurrence (`qkv`), and one
    after it (`output`).

    `kind` is an argument that only `Attention` needs; `is_wide` is as there.
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
        self._is_wide = is_wide
        self.qkv = make_linear(weights.inputs, weights.inputs_bias, 1.0)
        self.output = make_linear(weights.output, weights.output_bias, architecture.residual_scale)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what is projected from the input in the dtype of the recurrence."""
        return x.double() if self._is_wide else x


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class DeltaNet(RecurrentMixer):
    """A gated delta rule after a short convolution (Qwen3-Next). A `Branch`."""

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
        super().__init__(architecture, index, kind, weights, make_linear, is_wide=is_wide)
        assert weights.steps is not None
        self._steps = unrounded(make_linear, weights.steps, weights.steps_bias, is_wide=is_wide)

    on_torch = (
        "short convolutions",
        "states of the delta rule",
        "decays and gates of the delta rule",
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
        mixed, gate = self._wide(self.qkv(x)).split_with_sizes((sizes.channels, of_values), 1)
        beta, step = _at_least_float32(self._wide(self._steps(x))).chunk(2, 1)
        mixed = functional.silu(states.convs[self._index](steps, mixed, weights.convolution))
        query, key, value = mixed.split_with_sizes((of_keys, of_keys, of_values), 1)
        query = unit_length(query.view(-1, sizes.key_heads, sizes.key_size)) * sizes.key_size**-0.5
        key = unit_length(key.view(-1, sizes.key_heads, sizes.key_size))
        value = value.view(-1, heads, sizes.value_size)
        decay = weights.decay_rates * functional.softplus(step + weights.step_bias)
        read = states.states[self._index](
            steps, query, key, value, decay[..., None], beta.sigmoid()
        )
        read = rms_norm(self._architecture.norm_eps, weights.norm, read.float()).flatten(1)
        return (read * functional.silu(_at_least_float32(gate))).to(x.dtype)


class ShortConv(RecurrentMixer):
    """A short convolution with gates on its input and its output (LFM2). A `Branch`."""

    on_torch = ("short convolutions", "gates of short convolutions")

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        steps, states = inputs.recurrent_inputs
        before, after, values = self._wide(self.qkv(x)).chunk(3, 1)
        weights = self._weights
        convolved = states.convs[self._index](
            steps, before * values, weights.convolution, weights.convolution_bias
        )
        return (convolved.to(after.dtype) * after).to(x.dtype)
