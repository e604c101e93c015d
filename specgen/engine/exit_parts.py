"""The parts of EESD that do not depend on the backend: where the exit is, and the predictor of acceptance of Cali-TS (Eq. 5)."""

from __future__ import annotations

import torch
from torch import nn

from specgen.base.errors import SpecgenError

MAX_LAYERS = 2  # EESD's Figure 5 shows that more than one layer gains little


def check_exit_layers(count: int) -> None:
    """Raises SpecgenError unless an exit may have `count` decoder layers."""
    if not 0 <= count <= MAX_LAYERS:
        raise SpecgenError(f"the exit has {count} layers", f"It can have 0 (a head alone) to {MAX_LAYERS}")


def check_exit_depth(layers: int, depth: int, name: str = "the exit") -> None:
    """Raises SpecgenError unless an exit after the first `depth` of `layers` layers has a layer before and after it.

    `name` is what the message calls the exit.
    """
    if not 1 <= depth < layers:
        raise SpecgenError(f"{name} is after layer {depth} of {layers}", f"It can be after layer 1 to {layers - 1}")


def default_exit_depth(layers: int) -> int:
    """Returns N, the number of layers before EESD's exit: 1 + layers // 20.

    This gives both numbers of the paper (section 4.1), 5 of 80 layers and 3 of 40. From 10 layers on, it is always 5 to 10 % of
    them, as the paper suggests (section 5.4).
    """
    return 1 + layers // 20


class Predictor(nn.Module):
    """Predicts the probability theta_M = sigmoid(w . [W_i h_T, h_D] + b_i) that the i-th token of a draft (i from 1) is accepted.

    h_T is the target's hidden state (after the norm) from which the last committed token was predicted. h_D is the exit layer's
    hidden state from which the drafted token was predicted. b_i is a bias. W_i only occurs in the product of w's first half and
    W_i, so this vector is trained instead, one per position i. All positions from the tenth on share the same parameters.
    """

    POSITIONS = 10

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_weights = nn.Parameter(torch.zeros(self.POSITIONS, width))
        self.draft_weights = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(self.POSITIONS))

    def offsets(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """Returns the part of the sigmoid's argument that depends on the target's hidden state [..., width].

        The result [..., POSITIONS] has one number per position of a drafted token.
        """
        return nn.functional.linear(target_hidden.to(self.bias.dtype), self.target_weights, self.bias)

    def logits(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the sigmoid's argument [..., n] for n drafted tokens, for training.

        `offsets` [..., POSITIONS] is from `offsets`, `draft_hidden` [..., n, width] are the exit layer's hidden states, and
        `positions` [..., n] are the tokens' positions in the draft, from 1.
        """
        index = positions.clamp(1, self.POSITIONS) - 1
        return draft_hidden.to(self.bias.dtype) @ self.draft_weights + offsets.gather(-1, index)

    def score(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Returns theta_M, a scalar tensor, of one drafted token at `position` of the draft (from 1).

        `offsets` [POSITIONS] is from `offsets`; `draft_hidden` [width] is the hidden state from which the token was predicted.
        """
        offset = offsets[min(position, self.POSITIONS) - 1]
        return torch.sigmoid(draft_hidden.to(self.bias.dtype) @ self.draft_weights + offset)
