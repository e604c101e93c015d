"""The mixture of experts of a layer: its weights in a model's files, how they are read, and how it
runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Architecture, Mixture
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.mlp import (
    ACTIVATIONS,
    DenseMLP,
    MLPFiles,
    MLPWeights,
    gated_mlp_files,
)
from specgen.engine.native.tensors import LinearFiles, Tensor, linear_files, stacked
from specgen.engine.weights import Take


@dataclass(frozen=True, slots=True)
class OwnNorms:
    """What Gemma 4's mixtures have besides, each [width] but `scales` [count]: the norms before the
    router and before the experts, those after the shared MLP and after the experts (`outputs`), and
    the factors of the experts' outputs."""

    router: Tensor
    experts: Tensor
    outputs: tuple[Tensor, Tensor]
    scales: Tensor


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The weights of a mixture of experts in a model's files.

    `experts` has each expert's gate, up and down projection; if the files store all experts
    together, one entry with the two tensors of all. `choice_bias`, `shared` (an MLP that runs all
    tokens), its gate and `own_norms` are None where there are none.
    """

    router: LinearFiles
    choice_bias: Tensor | None
    experts: tuple[tuple[LinearFiles, ...], ...]
    shared: MLPFiles | None
    shared_gate: Tensor | None
    own_norms: OwnNorms | None


def expert_files(architecture: Architecture, index: int) -> ExpertFiles:
    """Returns names and shapes of the weights of the mixture in layer `index`."""
    mixture = architecture.mixture
    assert mixture is not None
    width = architecture.hidden_size
    count = mixture.count
    if mixture.own_norms:
        return _gemma_files(architecture, mixture, f"layers.{index}.")

    block = f"layers.{index}.mlp."
    is_interleaved = mixture.layout == "interleaved"
    router = linear_files(
        f"{block}{'router' if is_interleaved else 'gate'}", count, width, has_bias=is_interleaved
    )
    choice_bias = shared = shared_gate = None
    if mixture.choice_bias:
        choice_bias = Tensor(f"{block}gate.e_score_correction_bias", (count,))
    if mixture.shared_size:
        name = "shared_expert" if mixture.shared_gate else "shared_experts"
        shared = gated_mlp_files(f"{block}{name}.", width, mixture.shared_size)
    if mixture.shared_gate:
        shared_gate = Tensor(f"{block}shared_expert_gate.weight", (1, width))
    matrices = _matrices(mixture, width, f"{block}experts.")
    return ExpertFiles(router, choice_bias, matrices, shared, shared_gate, None)


def _matrices(mixture: Mixture, width: int, block: str) -> tuple[tuple[LinearFiles, ...], ...]:
    """Returns `ExpertFiles.experts`; the names begin with `block`."""
    count = mixture.count
    size = mixture.size
    gate_up = f"{block}gate_up_proj"
    down = f"{block}down_proj"
    if mixture.layout == "separate":
        experts = [gated_mlp_files(f"{block}{number}.", width, size) for number in range(count)]
        return tuple((*expert.gate_up, expert.down) for expert in experts)
    if mixture.layout == "fused":
        of_inputs = LinearFiles(Tensor(gate_up, (count, 2 * size, width)))
        return ((of_inputs, LinearFiles(Tensor(down, (count, width, size)))),)
    of_inputs = LinearFiles(
        Tensor(gate_up, (count, width, 2 * size)), Tensor(f"{gate_up}_bias", (count, 2 * size))
    )
    of_outputs = LinearFiles(
        Tensor(down, (count, size, width)), Tensor(f"{down}_bias", (count, width))
    )
    return ((of_inputs, of_outputs),)


def _gemma_files(architecture: Architecture, mixture: Mixture, layer: str) -> ExpertFiles:
    """Returns the weights of Gemma 4's mixtures, in which the shared MLP is the layer's own; names
    begin with `layer`."""
    width = architecture.hidden_size
    norms = {
        name: Tensor(f"{layer}{name}.weight", (width,))
        for name in (
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        )
    }
    experts_norm, *outputs = norms.values()
    own_norms = OwnNorms(
        Tensor(f"{layer}router.scale", (width,)),
        experts_norm,
        (outputs[0], outputs[1]),
        Tensor(f"{layer}router.per_expert_scale", (mixture.count,)),
    )
    return ExpertFiles(
        linear_files(f"{layer}router.proj", mixture.count, width),
        None,
        _matrices(mixture, width, f"{layer}experts."),
        gated_mlp_files(f"{layer}mlp.", width, architecture.intermediate_size),
        None,
        own_norms,
    )


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


def read_experts(
    files: ExpertFiles,
    architecture: Architecture,
    take: Take,
    dtype: torch.dtype,
    gain: torch.Tensor,
    norm_gain: float,
) -> ExpertWeights:
    """Returns the weights of a mixture in `dtype`. `take` returns a tensor by name. `gain` [width]:
    the factors of the norm before it; without its weights: `norm_gain`.

    Those of all experts in one tensor stay where they are, in the mapped file if that has the
    dtype.
    """
    mixture = architecture.mixture
    assert mixture is not None
    shared = gate = None
    if mixture.layout == "separate":
        size, width = mixture.size, architecture.hidden_size
        gate_up = gain.new_empty(mixture.count, 2 * size, width, dtype=dtype)
        down = gain.new_empty(mixture.count, width, size, dtype=dtype)
        for number, expert in enumerate(files.experts):
            gate_weight, up_weight, down_weight = (take(layer.weight.name) for layer in expert)
            gate_up[number, :size] = gate_weight
            gate_up[number, size:] = up_weight
            down[number] = down_weight
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    else:
        gate_up, down = (take(layer.weight.name).to(dtype) for layer in files.experts[0])
        if mixture.layout == "fused":
            gate_up = gate_up.transpose(1, 2)
            down = down.transpose(1, 2)
    biases = [
        take(layer.bias.name).to(dtype) for layer in files.experts[0] if layer.bias is not None
    ]
    gate_up_bias, down_bias = biases or (None, None)
    if files.shared is not None:
        gate_and_up, _ = stacked(files.shared.gate_up, take)
        shared_down = take(files.shared.down.weight.name)
        shared = MLPWeights((gate_and_up * gain).to(dtype), shared_down.to(dtype), None, None)
    if files.shared_gate is not None:
        gate = (take(files.shared_gate.name).float() * gain).to(dtype)
    before = gain, gain
    scales = None
    after = []
    if files.own_norms is not None:
        router_gain = take(files.own_norms.router.name).float() * architecture.hidden_size**-0.5
        experts_gain = take(files.own_norms.experts.name).float()
        before = router_gain * norm_gain, experts_gain * norm_gain
        scales = take(files.own_norms.scales.name).float()
        after = [take(norm.name).to(dtype) for norm in files.own_norms.outputs]
    router, router_bias = stacked((files.router,), take)
    return ExpertWeights(
        before[1].to(dtype),
        router.float() * before[0],
        None if router_bias is None else router_bias.float(),
        None if files.choice_bias is None else take(files.choice_bias.name).float(),
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        shared,
        gate,
        scales,
        tuple(after),
    )


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

    on_torch = ("choice of experts", "products of experts", "weighted sums of experts")

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
            outputs = functional.grouped_mm(active, own.down, offs=ends)
        else:
            experts = flat.index_select(0, order)
            active = self._clamped(inner + own.gate_up_bias.index_select(0, experts))
            outputs = functional.grouped_mm(active, own.down, offs=ends)
            outputs += own.down_bias.index_select(0, experts)
        own_weights = weights.flatten().index_select(0, order)
        weighted = outputs.float() * own_weights[:, None]
        return weighted.new_zeros(x.shape).index_add_(0, rows, weighted)

    def _clamped(self, inner: torch.Tensor) -> torch.Tensor:
        """Returns gpt-oss's activation of gates and ups that stand in turn."""
        limit = self._mixture.limit
        gate = inner[:, ::2].clamp(max=limit)
        up = inner[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * (gate * self._mixture.alpha).sigmoid_()
