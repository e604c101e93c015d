"""The MLPs of layers, dense ones and mixtures of experts, and their weights in a model's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Activation, Architecture, Mixture
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.weights import Take, bias_of

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


# of Gemma 4's mixtures: before the router and the experts, after the shared MLP and the experts
_LATER_NORMS = (
    f"{name}_feedforward_layernorm_{number}.weight"
    for name, number in (("pre", 2), ("post", 1), ("post", 2))
)
_EXPERT_NORMS = "router.scale", *_LATER_NORMS
_EXPERT_BLOCKS = {  # other names of mixtures and of their bias for the choice
    "minimax_m2": ("block_sparse_moe", "e_score_correction_bias"),
    "lfm2_moe": ("feed_forward", "expert_bias"),
}


class MLPWeights(NamedTuple):
    """The weights of an MLP. Matrices are [out, in]; `gate_up` has the rows of the gate, then those
    of the up projection."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class ExpertNames(NamedTuple):
    """The names of the weights of a mixture of experts.

    `experts` has the names of each expert's gate, up and down matrix; if the files store all
    experts together, one entry with the names of the two tensors. `choice_bias`, `shared` (gate,
    up, down), `shared_gate`, `norms` (those of `_EXPERT_NORMS`) and `scales` are empty where there
    are none.
    """

    router: str
    choice_bias: str
    experts: Sequence[tuple[str, ...]]
    shared: tuple[str, ...]
    shared_gate: str
    norms: tuple[str, ...]
    scales: str


class ExpertWeights(NamedTuple):
    """The weights of the MLP of a layer with `count` experts; each None is a part that the model's
    family does not have.

    `gate_up` [count, width, 2 x inner] and `down` [count, inner, width] are those of all experts.
    The columns of `gate_up` are the gates and then the ups; with the biases `gate_up_bias` [count,
    2 x inner] and `down_bias` [count, width], they take turns. `router` [count, width], its bias
    and `choice_bias` [count] are in float32. `shared` is an MLP that runs every token, and
    `shared_gate` [1, width] gives the factor of its output. `norm` [width] has the factors of the
    norm before the MLP: they are already multiplied into `router`, `shared` and `shared_gate`, but
    not into `gate_up`. Gemma 4's mixtures also have the factors `scales` [count] of the experts'
    outputs, and `post_norms`, the norms [width] of the outputs of `shared` and of all experts.
    """

    norm: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor | None
    choice_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    shared: MLPWeights | None
    shared_gate: torch.Tensor | None
    scales: torch.Tensor | None = None
    post_norms: tuple[torch.Tensor, ...] = ()


def expert_names(architecture: Architecture, index: int) -> ExpertNames:
    """Returns the names of the weights of the mixture in layer `index`."""
    mixture = architecture.mixture
    assert mixture is not None
    block = f"layers.{index}.mlp."
    matrices = ("gate_proj", "up_proj", "down_proj")
    choice_bias = f"{block}gate.e_score_correction_bias"
    if other := _EXPERT_BLOCKS.get(architecture.model_type):
        block = f"layers.{index}.{other[0]}."
        matrices = ("w1", "w3", "w2")
        choice_bias = f"{block}{other[1]}"

    def of(part: str) -> tuple[str, ...]:
        return tuple(f"{block}{part}.{matrix}.weight" for matrix in matrices)

    if mixture.own_norms:
        block = f"layers.{index}."
    experts = [of(f"experts.{number}") for number in range(mixture.count)]
    if mixture.layout != "separate":
        experts = [(f"{block}experts.gate_up_proj", f"{block}experts.down_proj")]
    router = (
        "router.proj"
        if mixture.own_norms
        else "router"
        if mixture.layout == "interleaved"
        else "gate"
    )
    shared = of(
        "mlp" if mixture.own_norms else "shared_expert" if mixture.shared_gate else "shared_experts"
    )
    return ExpertNames(
        router=f"{block}{router}.weight",
        choice_bias=choice_bias if mixture.choice_bias else "",
        experts=experts,
        shared=shared if mixture.shared_size else (),
        shared_gate=f"{block}shared_expert_gate.weight" if mixture.shared_gate else "",
        norms=tuple(f"{block}{name}" for name in _EXPERT_NORMS) if mixture.own_norms else (),
        scales=f"{block}router.per_expert_scale" if mixture.own_norms else "",
    )


def expert_shapes(architecture: Architecture, index: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the mixture in layer `index` by name, biases included."""
    names = expert_names(architecture, index)
    width = architecture.hidden_size
    mixture = architecture.mixture
    assert mixture is not None
    count = mixture.count
    size = mixture.size
    shapes: dict[str, tuple[int, ...]] = {names.router: (count, width)}
    if mixture.layout == "separate":
        for gate, up, down in names.experts:
            shapes[gate] = shapes[up] = (size, width)
            shapes[down] = (width, size)
    elif mixture.layout == "fused":
        gate_up, down = names.experts[0]
        shapes[gate_up] = (count, 2 * size, width)
        shapes[down] = (count, width, size)
    else:
        gate_up, down = names.experts[0]
        shapes[gate_up] = (count, width, 2 * size)
        shapes[down] = (count, size, width)
        shapes[f"{gate_up}_bias"] = (count, 2 * size)
        shapes[f"{down}_bias"] = (count, width)
        shapes[bias_of(names.router)] = (count,)
    if names.choice_bias:
        shapes[names.choice_bias] = (count,)
    if names.shared:
        gate, up, down = names.shared
        inner = architecture.intermediate_size if mixture.own_norms else mixture.shared_size
        shapes[gate] = shapes[up] = (inner, width)
        shapes[down] = (width, inner)
    if mixture.own_norms:
        shapes |= dict.fromkeys(names.norms, (width,)) | {names.scales: (count,)}
    if names.shared_gate:
        shapes[names.shared_gate] = (1, width)
    return shapes


def expert_weights(
    architecture: Architecture,
    index: int,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor,
    norm_gain: float,
) -> ExpertWeights:
    """Returns the weights of a mixture. `gain` [width]: the factors of the norm before it; without
    its weights: `norm_gain`.

    Those of all experts in one tensor stay where they are, in the mapped file if that has the
    dtype.
    """
    names = expert_names(architecture, index)
    mixture = architecture.mixture
    assert mixture is not None
    shared = gate = None
    if mixture.layout == "separate":
        size, width = mixture.size, architecture.hidden_size
        gate_up = gain.new_empty(mixture.count, 2 * size, width, dtype=dtype)
        down = gain.new_empty(mixture.count, width, size, dtype=dtype)
        for number, (gate_name, up_name, down_name) in enumerate(names.experts):
            gate_up[number, :size] = take(gate_name)
            gate_up[number, size:] = take(up_name)
            down[number] = take(down_name)
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    else:
        gate_up, down = (take(name).to(dtype) for name in names.experts[0])
        if mixture.layout == "fused":
            gate_up = gate_up.transpose(1, 2)
            down = down.transpose(1, 2)
    gate_up_bias = down_bias = None
    if mixture.layout == "interleaved":
        gate_up_bias, down_bias = (take(f"{name}_bias").to(dtype) for name in names.experts[0])
    if names.shared:
        gate_and_up, _ = stacked(names.shared[:2], take, False)
        shared = MLPWeights(
            (gate_and_up * gain).to(dtype), take(names.shared[2]).to(dtype), None, None
        )
    if names.shared_gate:
        gate = (take(names.shared_gate).float() * gain).to(dtype)
    before = gain, gain
    scales = None
    after = []
    if names.norms:
        own_gains = (
            take(names.norms[0]).float() * architecture.hidden_size**-0.5,
            take(names.norms[1]).float(),
        )
        before = own_gains[0] * norm_gain, own_gains[1] * norm_gain
        scales = take(names.scales).float()
        after = [take(name).to(dtype) for name in names.norms[2:]]
    return ExpertWeights(
        before[1].to(dtype),
        take(names.router).float() * before[0],
        take(bias_of(names.router)).float() if mixture.layout == "interleaved" else None,
        take(names.choice_bias).float() if names.choice_bias else None,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        shared,
        gate,
        scales,
        tuple(after),
    )


def stacked(
    names: tuple[str, ...], take: Take, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the matrices with these names below each other, and their biases, None without
    `has_bias`."""
    matrices = [take(name) for name in names]
    bias = torch.cat([take(bias_of(name)) for name in names]) if has_bias else None
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias


def scaled(copy: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Returns `copy` times `gain`, in place where that is possible: new memory costs as much time
    as the multiplication."""
    if torch.is_grad_enabled() or copy.dtype != gain.dtype:
        return copy * gain
    return copy.mul_(gain)


class DenseMLP:
    """The MLP activation(gate) * up. A `Branch`."""

    def __init__(
        self, architecture: Architecture, weights: MLPWeights, make_linear: MakeLinear
    ) -> None:
        self._activation = ACTIVATIONS[architecture.activation]
        self.gate_up = make_linear(weights.gate_up, weights.gate_up_bias, 1.0)
        self.output = make_linear(weights.down, weights.down_bias, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        active = self._activation(gate)
        return active * up if torch.is_grad_enabled() else active.mul_(up)


def route(
    mixture: Mixture, logits: torch.Tensor, choice_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts for n tokens, from the router's float32 `logits` [n, experts], by the
    rules of `mixture`.

    Returns the ids of the chosen experts and the weights of their outputs, each [n, experts per
    token]. `choice_bias` [experts] is added to the scores for the choice alone (None: there is
    none).
    """
    if mixture.scores == "logits":
        scores = logits
    elif mixture.scores == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if mixture.groups > 1:
        groups = choice.view(len(choice), mixture.groups, -1)
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        best = group_scores.topk(mixture.chosen_groups, dim=-1).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool)
        excluded.scatter_(1, best, False)
        choice = groups.masked_fill(excluded[..., None], -torch.inf).flatten(1)
    ids = choice.topk(mixture.per_token, dim=-1).indices
    weights = scores.gather(1, ids)
    if mixture.scores == "logits":
        weights = weights.softmax(-1)
    elif mixture.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + mixture.epsilon)
    return ids, weights * mixture.scale


class Experts:
    """A mixture of experts. A `Branch`, whose `output` does nothing, because each
    expert has its own.

    The tokens of a pass are grouped by the experts that run them, so each expert's weights are read
    once for all its tokens. Router and weighted sum are in float32, whatever the dtype. Not
    differentiable.
    """

    def __init__(
        self, architecture: Architecture, weights: ExpertWeights, make_linear: MakeLinear
    ) -> None:
        assert architecture.mixture is not None
        self._mixture = architecture.mixture
        self._eps = architecture.norm_eps
        self._weights = weights
        self._activation = ACTIVATIONS[architecture.activation]
        self._router = weights.router.t().contiguous()
        self._shared: DenseMLP | None = None
        if weights.shared is not None:
            self._shared = DenseMLP(architecture, weights.shared, make_linear)
        self.output = Linear(lambda x: x, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        weights = self._weights
        logits = x.float() @ self._router
        if weights.router_bias is not None:
            logits += weights.router_bias
        ids, scores = route(self._mixture, logits, weights.choice_bias)
        if weights.scales is not None:
            scores = scores * weights.scales[ids]
        mixed = self._mixed(x * weights.norm, ids, scores).to(x.dtype)
        if self._shared is None:
            return mixed
        shared = self._shared.output(self._shared(x, inputs))
        if weights.post_norms:
            outputs = zip((shared, mixed), weights.post_norms, strict=True)
            shared, mixed = (
                functional.rms_norm(output, norm.shape, norm, self._eps) for output, norm in outputs
            )
        if weights.shared_gate is not None:
            shared *= (x @ weights.shared_gate.t()).sigmoid_()
        return mixed.add_(shared)

    def _mixed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum, in float32, of what the experts `ids` make of the hidden states
        `x` [n, width]."""
        own = self._weights
        count = self._mixture.count
        flat = ids.flatten()
        order = flat.argsort()  # by expert
        rows = order // ids.shape[1]
        sizes = torch.histc(flat.float(), count, 0, count - 1)
        ends = sizes.cumsum(0).to(torch.int32)
        inner = functional.grouped_mm(x.index_select(0, rows), own.gate_up, offs=ends)
        if own.gate_up_bias is None or own.down_bias is None:
            gate, up = inner.chunk(2, dim=-1)
            active = self._activation(gate).mul_(up)
            found = functional.grouped_mm(active, own.down, offs=ends)
        else:
            experts = flat.index_select(0, order)
            active = self._clamped(inner + own.gate_up_bias.index_select(0, experts))
            found = functional.grouped_mm(active, own.down, offs=ends)
            found += own.down_bias.index_select(0, experts)
        own_weights = weights.flatten().index_select(0, order)
        weighted = found.float() * own_weights[:, None]
        return weighted.new_zeros(x.shape).index_add_(0, rows, weighted)

    def _clamped(self, inner: torch.Tensor) -> torch.Tensor:
        """Returns gpt-oss's activation of gates and ups that stand in turn."""
        limit = self._mixture.limit
        gate = inner[:, ::2].clamp(max=limit)
        up = inner[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * (gate * self._mixture.alpha).sigmoid_()
