"""The MLPs of layers: dense ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Activation, Architecture, Mixture
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.layer_weights import ExpertWeights, MLPWeights
from specgen.engine.native.products import MakeProduct, Product

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class DenseMLP:
    """The MLP activation(gate) * up. A `Branch`."""

    def __init__(self, architecture: Architecture, weights: MLPWeights, make_product: MakeProduct) -> None:
        self._activation = ACTIVATIONS[architecture.activation]
        self.gate_up = make_product(weights.gate_up, weights.gate_up_bias, 1.0)
        self.output = make_product(weights.down, weights.down_bias, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        active = self._activation(gate)
        return active * up if torch.is_grad_enabled() else active.mul_(up)


def route(mixture: Mixture, logits: torch.Tensor, choice_bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts for n tokens, from the router's float32 `logits` [n, experts], by the rules of `mixture`.

    Returns the ids of the chosen experts and the weights of their outputs, each [n, experts per token]. `choice_bias` [experts]
    is added to the scores for the choice alone (None: there is none).
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
    """A mixture of experts. A `Branch`, whose last product `output` does nothing, because each expert has its own.

    The tokens of a pass are grouped by the experts that run them, so each expert's weights are read once for all its tokens.
    Router and weighted sum are in float32, whatever the dtype. Not differentiable.
    """

    def __init__(self, architecture: Architecture, weights: ExpertWeights, make_product: MakeProduct) -> None:
        assert architecture.mixture is not None
        self._mixture = architecture.mixture
        self._eps = architecture.norm_eps
        self._weights = weights
        self._activation = ACTIVATIONS[architecture.activation]
        self._router = weights.router.t().contiguous()
        self._shared: DenseMLP | None = None
        if weights.shared is not None:
            self._shared = DenseMLP(architecture, weights.shared, make_product)
        self.output = Product(lambda x: x, architecture.residual_scale)

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
            shared, mixed = (functional.rms_norm(output, norm.shape, norm, self._eps) for output, norm in outputs)
        if weights.shared_gate is not None:
            shared *= (x @ weights.shared_gate.t()).sigmoid_()
        return mixed.add_(shared)

    def _mixed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum, in float32, of what the experts `ids` make of the hidden states `x` [n, width]."""
        own, count = self._weights, self._mixture.count
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
