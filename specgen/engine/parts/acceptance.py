"""The predictor of acceptance of EESD's Cali-TS (Eq. 5)."""

from __future__ import annotations

import torch
from torch import nn

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner


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


class ExitAcceptancePredictor:
    """Predicts the probability that a drafted token is accepted: theta_M of EESD, Eq. 5.

    The inputs are the target's hidden state before the draft and the exit layer's hidden state at the drafted token.
    """

    def __init__(self, target: ModelRunner, predictor: Predictor) -> None:
        self.predictor, self._target = predictor, target
        self._offsets = torch.zeros(predictor.POSITIONS, device=target.device)

    def begin(self, context: Context) -> None:
        """Starts a draft after `context`: computes the part of the prediction that depends only on the target's hidden state."""
        hidden = self._target.last_hidden_state(context)
        if hidden is None:  # only outside of decoding: while decoding, the target has just predicted the context's last token
            hidden = torch.zeros_like(self.predictor.draft_weights)
        self._offsets = self.predictor.offsets(hidden)

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Returns the predicted acceptance probability, a scalar tensor, of the token at `position` of the draft (from 1).

        `draft_hidden` [width] is the exit layer's hidden state from which this token was predicted.
        """
        return self.predictor.score(self._offsets, draft_hidden, position)
