"""The mixture of experts of a layer: its weights in a model's files, how they are read, and how it
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.kernels.branches import LinearRuns
from specgen.engine.kernels.experts import ExpertsWeight
from specgen.engine.kernels.operators import Kernels
from specgen.engine.native.architecture import Architecture, Mixture
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import KernelLinear, Linear, MakeLinear, Multiply, unrounded
from specgen.engine.native.mlp import (
    ACTIVATIONS,
    DenseMLP,
    MLPFiles,
    MLPWeights,
    gated_mlp_files,
    read_mlp,
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


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The matrices and biases of all experts in a model's files, which are read when they are asked
    for. `take` returns a tensor by name, `take_matrix` one with weights, if need be as bytes (see
    `gguf.rounded`)."""

    files: tuple[tuple[LinearFiles, ...], ...]
    mixture: Mixture
    take: Take
    take_matrix: Take

    def each(self) -> Iterator[MLPWeights]:
        """Yields the weights of one expert after the other, as they are stored. The rows of the
        gate stand first."""
        if self.mixture.layout == "separate":
            for expert in self.files:
                gate_up, gate_up_bias = stacked(expert[:2], self.take, self.take_matrix)
                down, down_bias = stacked(expert[2:], self.take, self.take_matrix)
                yield MLPWeights(gate_up, down, gate_up_bias, down_bias)
            return
        of_all = [self.take_matrix(layer.weight.name) for layer in self.files[0]]
        of_all += self._biases()
        for number in range(self.mixture.count):
            own = [tensor[number] for tensor in of_all]
            if self.mixture.layout == "fused":
                yield MLPWeights(own[0], own[1], None, None)
            else:
                yield MLPWeights(_gates_first(own[0].t()), own[1].t(), _gates_first(own[2]), own[3])

    def together(self, dtype: torch.dtype) -> MLPWeights:
        """Returns the weights of all experts in `dtype`: matrices [count, width, 2 x inner] and
        [count, inner, width], and biases [count, ...].

        The columns of `gate_up` are the gates and then the ups; with biases, they take turns. Those
        of all experts in one tensor stay where they are, in the mapped file if that has the dtype.
        """
        if self.mixture.layout == "separate":
            experts = self.each()
            first = next(experts)
            gate_up, down = (
                weight.new_empty(self.mixture.count, *weight.shape, dtype=dtype)
                for weight in first[:2]
            )
            for number, expert in enumerate((first, *experts)):
                gate_up[number] = expert.gate_up
                down[number] = expert.down
            return MLPWeights(gate_up.transpose(1, 2), down.transpose(1, 2), None, None)
        gate_up, down = (self.take(layer.weight.name).to(dtype) for layer in self.files[0])
        if self.mixture.layout == "fused":
            gate_up = gate_up.transpose(1, 2)
            down = down.transpose(1, 2)
        biases = [bias.to(dtype) for bias in self._biases()]
        return MLPWeights(gate_up, down, *(biases or (None, None)))

    def _biases(self) -> list[torch.Tensor]:
        return [self.take(layer.bias.name) for layer in self.files[0] if layer.bias is not None]


def _gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows of gates and ups that take turns as all gates and then all ups."""
    return torch.cat((rows[::2], rows[1::2]))


class ExpertWeights(NamedTuple):
    """The weights of the MLP of a layer with `count` experts; each None is a part that the model's
    family does not have, or a norm's weights that are part of what follows it.

    `router` [count, width], its bias and `choice_bias` [count] are in float32 or as they are
    stored. `shared` is an MLP that runs every token, and `shared_gate` [1, width] gives the factor
    of its output. `experts_norm`, `router_norm` and `shared_norm` [width] are the factors of the
    input of the experts, of the router, and of `shared`. Gemma 4's mixtures also have the factors
    `scales` [count] of the experts' outputs, and `post_norms`, the norms [width] of the outputs of
    `shared` and of all experts.
    """

    experts: StoredExperts
    router: torch.Tensor
    router_bias: torch.Tensor | None
    choice_bias: torch.Tensor | None
    shared: MLPWeights | None
    shared_gate: torch.Tensor | None
    experts_norm: torch.Tensor | None
    router_norm: torch.Tensor | None = None
    shared_norm: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    post_norms: tuple[torch.Tensor, ...] = ()


Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def read_experts(
    files: ExpertFiles,
    architecture: Architecture,
    take: Take,
    dtype: torch.dtype | None,
    gain: torch.Tensor,
    norm_gain: float,
    take_matrix: Take | None = None,
) -> ExpertWeights:
    """Returns the weights of a mixture. `take` returns a tensor by name. `gain` [width]: the
    factors of the norm before it; without its weights: `norm_gain`.

    They are in `dtype`, with the factors of norms in all matrices but the experts'. `dtype` None,
    for our own kernels: matrices stay as `take_matrix` returns them, and the router as `take` does;
    the factors are then in the norm before the mixture, or with own norms in the weights here.
    """
    mixture = architecture.mixture
    assert mixture is not None
    router_gain = experts_gain = gain
    scales = None
    after: tuple[torch.Tensor, ...] = ()
    if (own := files.own_norms) is not None:
        router_gain = take(own.router.name).float() * architecture.hidden_size**-0.5 * norm_gain
        experts_gain = take(own.experts.name).float() * norm_gain
        scales = take(own.scales.name).float()
        after = tuple(take(norm.name).to(dtype or torch.float32) for norm in own.outputs)
    router, router_bias = stacked((files.router,), take)
    gate = None if files.shared_gate is None else take(files.shared_gate.name)
    # of the inputs of the experts, the router and the shared MLP
    norms: Norms = (None, None, None)
    if dtype is not None:
        router = router.float() * router_gain
        gate = None if gate is None else (gate.float() * gain).to(dtype)
        norms = (experts_gain.to(dtype), None, None)
    elif own is not None:
        norms = (experts_gain, router_gain, gain)
    shared = None
    if files.shared is not None:
        shared = read_mlp(files.shared, take, dtype, None if dtype is None else gain, take_matrix)
    return ExpertWeights(
        StoredExperts(files.experts, mixture, take, take_matrix or take),
        router,
        None if router_bias is None else router_bias.float(),
        None if files.choice_bias is None else take(files.choice_bias.name).float(),
        shared,
        gate,
        *norms,
        scales=scales,
        post_norms=after,
    )


def route(
    mixture: Mixture, logits: torch.Tensor, choice_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts for n tokens, from the router's `logits` [n, experts], by the rules of
    `mixture`.

    Returns the ids of the chosen experts and the weights of their outputs, each [n, experts per
    token], the latter in the dtype of `logits`. `choice_bias` [experts] is added to the scores for
    the choice alone (None: there is none).
    """
    if mixture.scores == "logits":
        scores = logits
    elif mixture.scores == "sigmoid":
        scores = _sigmoid(logits)
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


class Together:
    """The experts' MLPs by torch's grouped products. Not differentiable."""

    def __init__(self, architecture: Architecture, weights: MLPWeights, mixture: Mixture) -> None:
        self._mixture = mixture
        self._weights = weights
        self._activation = ACTIVATIONS[architecture.activation]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum, in float32, of what the experts `ids` make of the hidden states
        `x` [n, width]; `ids` and `weights` [n, experts per token]."""
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
            inner += own.gate_up_bias.index_select(0, experts)
            active = _clamped(self._mixture, inner[:, ::2], inner[:, 1::2])
            outputs = functional.grouped_mm(active, own.down, offs=ends)
            outputs += own.down_bias.index_select(0, experts)
        own_weights = weights.flatten().index_select(0, order)
        weighted = outputs.float() * own_weights[:, None]
        return weighted.new_zeros(x.shape).index_add_(0, rows, weighted)


class Apart:
    """The experts' MLPs one after the other, with linear layers of their own: for weights that are
    rounded, without our own kernels."""

    def __init__(
        self, architecture: Architecture, experts: StoredExperts, make_linear: MakeLinear
    ) -> None:
        self._mixture = experts.mixture
        self._activation = ACTIVATIONS[architecture.activation]
        self._experts = [
            (
                make_linear(expert.gate_up, _in_float32(expert.gate_up_bias)),
                make_linear(expert.down, _in_float32(expert.down_bias)),
            )
            for expert in experts.each()
        ]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `Together`. A row adds its experts in the order of their numbers."""
        total = torch.zeros_like(x)
        for number in sorted(set(ids.flatten().tolist())):
            gate_up, down = self._experts[number]
            rows, terms = (ids == number).nonzero(as_tuple=True)
            gate, up = gate_up(x.index_select(0, rows)).chunk(2, dim=-1)
            if self._mixture.layout == "interleaved":
                active = _clamped(self._mixture, gate, up)
            else:
                active = self._activation(gate).mul_(up)
            own_weights = weights[rows, terms].float()
            total.index_add_(0, rows, down(active).mul_(own_weights[:, None]))
        return total


class InKernels:
    """The experts' MLPs by our own kernels. A row's result has the same bits whichever rows are
    computed with it."""

    def __init__(
        self,
        architecture: Architecture,
        experts: StoredExperts,
        make_linear: MakeLinear,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._mixture = experts.mixture
        self._activation = architecture.activation
        gate_up = []
        down = []
        for expert in experts.each():
            gate_up.append(_runs(make_linear, expert.gate_up, expert.gate_up_bias))
            down.append(_runs(make_linear, expert.down, expert.down_bias))
        self._gate_up = ExpertsWeight(gate_up)
        self._down = ExpertsWeight(down)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `Together`. A row adds its experts in the order of `ids`."""
        kernels = self._kernels
        mixture = self._mixture
        flat = ids.flatten()
        order = flat.argsort(stable=True)  # by expert
        ends = torch.bincount(flat, minlength=mixture.count).cumsum(0)
        rows = x.index_select(0, order // ids.shape[1])
        inner = kernels.grouped_product(self._gate_up, rows, ends)
        if mixture.layout == "interleaved":
            active = kernels.clamped_gated(inner, mixture.limit, mixture.alpha)
        else:
            active = kernels.gated(inner, self._activation)
        outputs = kernels.grouped_product(self._down, active, ends)
        positions = order.argsort().view_as(ids)
        return kernels.weighted_sums(outputs, positions, weights.float())


def _runs(make_linear: MakeLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearRuns:
    linear = make_linear(weight, bias)
    assert isinstance(linear, KernelLinear)
    return linear.runs


def _in_float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _clamped(mixture: Mixture, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns gpt-oss's activation of gates and ups."""
    gate = gate.clamp(max=mixture.limit)
    up = up.clamp(-mixture.limit, mixture.limit)
    return (up + 1) * gate * (gate * mixture.alpha).sigmoid_()


class Experts:
    """A mixture of experts. A `Branch`, whose `output` does nothing, because each
    expert has its own.

    The tokens of a pass are grouped by the experts that run them, so each expert's weights are read
    once for all its tokens. Router and weighted sum are in float32, whatever the dtype, and the
    router is never rounded: another choice of experts changes more than another rounding of their
    weights. Not differentiable.
    """

    on_torch: tuple[str, ...] = ("choice of experts", "sums with shared experts")

    def __init__(
        self, architecture: Architecture, weights: ExpertWeights, make_linear: MakeLinear
    ) -> None:
        assert architecture.mixture is not None
        self._mixture = architecture.mixture
        self._eps = architecture.norm_eps
        self._kernels = make_linear.kernels
        # not the whole of `weights`, which may hold what is read from the files
        self._choice_bias = weights.choice_bias
        self._scales = weights.scales
        self._post_norms = weights.post_norms
        self._experts_norm = weights.experts_norm
        self._router_norm = weights.router_norm
        self._shared_norm = weights.shared_norm
        self._run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
        if self._kernels is not None:
            self._run = InKernels(architecture, weights.experts, make_linear, self._kernels)
        elif make_linear.rounding is not None:
            self._run = Apart(architecture, weights.experts, make_linear)
        else:
            assert weights.experts_norm is not None
            together = weights.experts.together(weights.experts_norm.dtype)
            self._run = Together(architecture, together, self._mixture)
        # then the choice of experts does not depend on the rows beside a row
        is_wide = self._kernels is not None or make_linear.rounding is not None
        self._router = unrounded(make_linear, weights.router, weights.router_bias, is_wide=is_wide)
        self._shared_gate: Multiply | None = None
        if weights.shared_gate is not None:
            self._shared_gate = unrounded(make_linear, weights.shared_gate, is_wide=is_wide)
        self._shared: DenseMLP | None = None
        if weights.shared is None:
            self.on_torch = ("choice of experts",)
        else:
            self._shared = DenseMLP(architecture, weights.shared, make_linear)
        self.output = Linear(lambda x: x, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        logits = self._router(_times(x, self._router_norm))
        ids, scores = route(self._mixture, logits, self._choice_bias)
        if self._scales is not None:
            scores = scores * self._scales[ids]
        mixed = self._run(_times(x, self._experts_norm), ids, scores).to(x.dtype)
        if self._shared is None:
            return mixed
        shared = self._shared.output(self._shared(_times(x, self._shared_norm), inputs))
        if self._post_norms:
            shared, mixed = (
                self._normed(output, norm)
                for output, norm in zip((shared, mixed), self._post_norms, strict=True)
            )
        if self._shared_gate is not None:
            shared *= _sigmoid(self._shared_gate(x)).to(x.dtype)
        return mixed.add_(shared)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x, norm, self._eps)
        return functional.rms_norm(x, norm.shape, norm, self._eps)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns sigmoid(x). In float64, equal numbers give equal bits. torch's own function computes
    the last few numbers of a tensor in another way, so that theirs may differ."""
    return 1 / (1 + (-x).exp()) if x.dtype == torch.float64 else x.sigmoid()


def _times(x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return x if factors is None else x * factors
