"""Initial weights that are solved for instead of learned: linear maps of the target's hidden states
by least squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 16_384  # tokens
_LEAST_ROWS = 56
# penalties that are tried, relative to the mean variance of the inputs
_PENALTIES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_CHOOSING = 8  # one row in so many chooses the penalty


class LinearMap(NamedTuple):
    """The map x -> `weight` x + `bias`, with a weight [out, in] and a bias [out], float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def least_squares(inputs: Tensor, outputs: Tensor, *, centred: bool = True) -> LinearMap | None:
    """Returns the linear map of inputs [n, in] to outputs [n, out] with the least squared error and
    a penalty of its weights (ridge regression). None if there are too few rows, or if no map is
    better than none.

    The rows are those of consecutive tokens. The last ones choose the penalty, by maps that are not
    solved for them. Without `centred` the bias is zero.
    """
    rows = min(len(inputs), MOST_ROWS)
    solved = rows - rows // _CHOOSING
    best = None
    least = float(outputs[solved:rows].float().square().mean())
    maps = ridge_path(inputs[:solved], outputs[:solved], centred=centred)
    for penalty, found in maps.items():
        misses = found(inputs[solved:rows].float()) - outputs[solved:rows]
        error = float(misses.square().mean())
        if error < least:
            least = error
            best = penalty
    if best is None:
        return None
    return ridge_path(inputs, outputs, (best,), centred=centred)[best]


def ridge_path(
    inputs: Tensor,
    outputs: Tensor,
    penalties: Sequence[float] = _PENALTIES,
    *,
    centred: bool = True,
) -> dict[float, LinearMap]:
    """Returns the linear maps of inputs [n, in] to outputs [n, out] with the least squared error
    and each of several penalties of their weights, by penalty, the smallest first. Empty if there
    are too few rows. Without `centred` the biases are zero."""
    x = inputs[:MOST_ROWS].float()
    y = outputs[:MOST_ROWS].float()
    if len(x) < _LEAST_ROWS:
        return {}
    mean_x = x.mean(0) if centred else torch.zeros_like(x[0])
    mean_y = y.mean(0) if centred else torch.zeros_like(y[0])
    x = x - mean_x
    covariance = (x.T @ x).double() / len(x)
    products = (x.T @ (y - mean_y)).double() / len(x)
    variance = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    ridge = torch.eye(len(covariance), device=x.device, dtype=torch.double)
    maps = {}
    for penalty in penalties:
        factor, failed = torch.linalg.cholesky_ex(covariance + penalty * variance * ridge)
        if not failed:
            weight = torch.cholesky_solve(products, factor).T.float()
            maps[penalty] = LinearMap(weight, mean_y - weight @ mean_x)
    return maps
