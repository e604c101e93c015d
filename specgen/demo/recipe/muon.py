"""Muon optimizer for matrices (Jordan et al. 2024; scaled as in Liu et al. 2025, arXiv 2502.16982).

torch.optim.Muon computes the same, but one matrix at a time and always in bfloat16, which is slow on a CPU without bfloat16
instructions. Here matrices of the same shape are stacked, and the dtype of the products can be chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, for hidden matrices. Embeddings, norms and heads need another optimizer.

    The update of an [m, n] matrix is scaled by 0.2 √max(m, n): its root mean square is about that of AdamW's update, so that one
    learning rate suits all shapes. `dtype` is the dtype of the Newton-Schulz iteration.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

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
        """The orthogonalized Nesterov momentum of `matrices`: [number of matrices, m, n]."""
        momenta, gradients = [], []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            momenta.append(state["momentum_buffer"])
            gradients.append(matrix.grad)
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        nesterov = torch._foreach_lerp(gradients, momenta, momentum)
        return orthogonalize(torch.stack(nesterov).to(self.dtype)).to(matrices[0].dtype)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest orthogonal matrix of each [..., m, n]: singular values become 0.7 to 1.2 (Newton-Schulz)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
