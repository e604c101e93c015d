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
    """Returns the ids and the weights [n, experts per token] of the experts that run n tokens, from the router's float32 logits.

    `logits` are [n, experts], `choice_bias` [experts]; see `Mixture`.
    """
    scores = logits
    if mixture.scores != "logits":
        scores = logits.sigmoid() if mixture.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if mixture.groups > 1:
        groups = choice.view(-1, mixture.groups, mixture.count // mixture.groups)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(mixture.chosen_groups, dim=-1).indices
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        choice = groups.masked_fill(excluded[..., None], -torch.inf).flatten(1)
    ids = choice.topk(mixture.per_token, dim=-1).indices
    weights = scores.gather(1, ids)
    if mixture.scores == "logits":
        weights = weights.softmax(-1)
    elif mixture.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + mixture.epsilon)
    return ids, weights * mixture.scale


class Experts:
    """A mixture of experts. A `Branch`, whose output product does nothing: the experts have their own.

    The experts' products are computed in groups of the tokens that an expert runs, so a pass takes as long as reading the
    weights of its tokens' experts takes. Router and weighted sum are in float32, whatever the dtype. Not differentiable.
    """

    def __init__(self, architecture: Architecture, weights: ExpertWeights, make_product: MakeProduct) -> None:
        assert architecture.mixture is not None
        self._mixture, self._weights, self._activation = architecture.mixture, weights, ACTIVATIONS[architecture.activation]
        self._router = weights.router.t().contiguous()
        self._shared = None if weights.shared is None else DenseMLP(architecture, weights.shared, make_product)
        self.output = Product(lambda x: x, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        weights, wide = self._weights, x.float()
        logits = wide @ self._router if weights.router_bias is None else torch.addmm(weights.router_bias, wide, self._router)
        mixed = self._mixed(x * weights.norm, *route(self._mixture, logits, weights.choice_bias)).to(x.dtype)
        if self._shared is None:
            return mixed
        shared = self._shared.output(self._shared(x, inputs))
        return mixed + (shared if weights.shared_gate is None else shared * (x @ weights.shared_gate.t()).sigmoid_())

    def _mixed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum, in float32, of what the experts `ids` make of the hidden states `x` [n, width]."""
        own, flat = self._weights, ids.flatten()
        order = flat.argsort()  # by expert
        sizes = torch.histc(flat.float(), self._mixture.count, 0, self._mixture.count - 1)
        ends, rows = sizes.cumsum(0).to(torch.int32), order // ids.shape[1]
        inner = functional.grouped_mm(x.index_select(0, rows), own.gate_up, offs=ends)
        if own.gate_up_bias is None or own.down_bias is None:
            gate, up = inner.chunk(2, dim=-1)
            found = functional.grouped_mm(self._activation(gate).mul_(up), own.down, offs=ends).float()
        else:
            experts = flat.index_select(0, order)
            active = self._clamped(inner + own.gate_up_bias.index_select(0, experts))
            found = (functional.grouped_mm(active, own.down, offs=ends) + own.down_bias.index_select(0, experts)).float()
        found *= weights.flatten().index_select(0, order)[:, None]
        return found.new_zeros(x.shape).index_add_(0, rows, found)

    def _clamped(self, inner: torch.Tensor) -> torch.Tensor:
        """Returns gpt-oss's activation of gates and ups that stand in turn."""
        limit = self._mixture.limit
        gate, up = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * (gate * self._mixture.alpha).sigmoid_()
