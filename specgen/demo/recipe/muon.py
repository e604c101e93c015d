"""Muon (Jordan et al. 2024; scaled as in Liu et al. 2025, arXiv 2502.16982): momentum, made orthogonal, for the matrices.

torch.optim.Muon does the same matrix by matrix and in bfloat16. Here matrices of one shape go together, and on a processor
without units for bfloat16 in float32: there that is twice as fast, and the difference between an optimizer that pays
and one that eats what it gains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, steepest at zero
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For hidden matrices alone; embeddings, norms and heads belong to AdamW.

    The update of an [m, n] matrix is scaled by 0.2 √max(m, n), so that its root mean square is AdamW's and one learning rate
    fits matrices of every shape. `products` is the dtype of the iteration.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        products: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.products = products

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = self._updates(matrices, group["momentum"])
                scale = 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, list(updates.unbind()), alpha=-group["lr"] * scale)

    def _updates(self, matrices: list[torch.Tensor], momentum: float) -> torch.Tensor:
        """Nesterov momentum of each, made orthogonal [matrices, m, n]."""
        moments, gradients = [], []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            moments.append(state["momentum_buffer"])
            gradients.append(matrix.grad)
        torch._foreach_lerp_(moments, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, moments, momentum)
        return orthogonal(torch.stack(ahead).to(self.products)).to(matrices[0].dtype)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """About the nearest orthogonal matrix of each [..., m, n]: singular values end between 0.7 and 1.2 (Newton-Schulz)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
