"""Initial weights that are solved for instead of learned: linear maps of the target's hidden states
by least squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 16_384  # tokens
_LEAST_ROWS = 64
# penalties that are tried, relative to the mean variance of the inputs
_PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3)
_CHOOSING = 8  # one row in so many chooses the penalty


class LinearMap(NamedTuple):
    """The map x -> `weight` x + `bias`, with a weight [out, in] and a bias [out], float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def least_squares(inputs: Tensor, outputs: Tensor, *, centred: bool = True) -> LinearMap | None:
    """Returns the linear map of inputs [n, in] to outputs [n, out] with the least squared error and
    a penalty of its weights (ridge regression). None if there are too few rows.

    The rows are those of consecutive tokens. The last ones choose the penalty, and are not solved
    for. Without `centred` the bias is zero.
    """
    rows = min(len(inputs), MOST_ROWS)
    if rows < _LEAST_ROWS:
        return None
    held_out = rows // _CHOOSING
    x = inputs[: rows - held_out].float()
    y = outputs[: rows - held_out].float()
    mean_x = x.mean(0) if centred else torch.zeros_like(x[0])
    mean_y = y.mean(0) if centred else torch.zeros_like(y[0])
    x = x - mean_x
    covariance = (x.T @ x).double() / len(x)
    products = (x.T @ (y - mean_y)).double() / len(x)
    variance = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    best: tuple[float, LinearMap] | None = None
    for penalty in _PENALTIES:
        ridge = torch.eye(len(covariance), device=x.device, dtype=torch.double)
        factor, failed = torch.linalg.cholesky_ex(covariance + penalty * variance * ridge)
        if failed:
            continue
        weight = torch.cholesky_solve(products, factor).T.float()
        found = LinearMap(weight, mean_y - weight @ mean_x)
        misses = found(inputs[rows - held_out : rows].float()) - outputs[rows - held_out : rows]
        error = float(misses.square().mean())
        if best is None or error < best[0]:
            best = error, found
    return None if best is None else best[1]
