"""Training of the acceptance predictor that EESD's method Cali-TS uses with an exit layer (EESD, section 3.3).

The predictor estimates the probability that the target accepts a token that the exit layer drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.exit_parts import Predictor
from specgen.training.generated_text import GeneratedText

STEPS, BATCH, LEARNING_RATE = 600, 4096, 3e-3

ExitOutputs = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function from token ids [n] to the exit's next-token logits [n, vocabulary] and hidden states [n, width] after each token."""


@dataclass(frozen=True, slots=True)
class _Examples:
    """Training data of the predictor: one row for each of the n tokens of all texts, which are stored one after the other.

    `target_states` and `exit_states` [n, width] are the hidden states of target and exit after the token. `agreed` [n] tells
    whether both have the same most probable next token. `ends` [n] is the row of the last token of the same text.
    """

    target_states: torch.Tensor
    exit_states: torch.Tensor
    agreed: torch.Tensor
    ends: torch.Tensor


def train_predictor(
    exit_outputs: ExitOutputs, texts: Sequence[GeneratedText], seed: int
) -> tuple[Predictor, dict[str, float]] | None:
    """Trains a predictor of whether the target accepts a token that the exit drafts. Returns it and its measurements.

    Only texts whose field `hidden_states` is not None are used; texts that are held out measure the predictor. `exit_outputs`
    computes the exit's logits and hidden states for a text. The measurements are `loss`, `base_loss` and `ranking` (see
    `_measure`). Returns None if no such text with at least 3 tokens is left for training, or none is held out.

    The texts consist of the target's own tokens, so all drafted tokens before a position count as accepted. The predictor thus
    learns the probability that a drafted token is accepted if all drafted tokens before it are.
    """
    train = _examples(exit_outputs, [text for text in texts if not text.held_out])
    held_out = _examples(exit_outputs, [text for text in texts if text.held_out])
    if train is None or held_out is None:
        return None
    device = train.agreed.device
    generator = torch.Generator(device).manual_seed(seed)
    predictor = Predictor(train.target_states.shape[1]).to(device)
    with torch.no_grad():  # the initial prediction is the mean
        mean = train.agreed.float().mean().clamp(1e-3, 1 - 1e-3)
        predictor.bias.fill_(float(torch.logit(mean)))
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        logits, labels = _sample(predictor, train, generator, BATCH)
        F.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    predictor.requires_grad_(False)
    return predictor, _measure(predictor, held_out, generator)


def _examples(exit_outputs: ExitOutputs, texts: Sequence[GeneratedText]) -> _Examples | None:
    target_states, exit_states, agreed, ends = [], [], [], []
    for text in texts:
        if text.hidden_states is not None and len(text.ids) > 2:
            logits, hidden = exit_outputs(text.ids)
            agreed.append(logits.argmax(dim=-1) == text.top1.to(logits.device))
            exit_states.append(hidden)
            target_states.append(text.hidden_states.to(hidden.device))
            ends.append(torch.full((len(hidden),), sum(map(len, exit_states)) - 1, device=hidden.device))
    return _Examples(*map(torch.cat, (target_states, exit_states, agreed, ends))) if ends else None


def _sample(
    predictor: Predictor, examples: _Examples, generator: torch.Generator, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predictor's logits and the labels (1: exit and target agree) of at most `count` random drafted tokens.

    Each one has a random start of its draft and a random position in the draft. It is dropped if it lies beyond its text's end.
    """
    device = examples.agreed.device
    begin = torch.randint(len(examples.agreed), (count,), generator=generator, device=device)
    # Two more than POSITIONS: positions beyond it share its weights.
    positions = torch.randint(1, Predictor.POSITIONS + 3, (count,), generator=generator, device=device)
    inside = begin + positions <= examples.ends[begin]
    begin, positions = begin[inside], positions[inside]
    # Between the target's hidden state and the exit's lies the committed token that the former produced.
    drafted = begin + positions
    offsets = predictor.offsets(examples.target_states[begin].float())
    logits = predictor.logits(offsets, examples.exit_states[drafted].float()[:, None], positions[:, None])[:, 0]
    return logits, examples.agreed[drafted].float()


@torch.no_grad()
def _measure(predictor: Predictor, examples: _Examples, generator: torch.Generator) -> dict[str, float]:
    """Returns measurements of the predictor on a sample of the examples.

    `loss` is its cross-entropy in nats. `base_loss` is the cross-entropy of always predicting the mean of the labels. `ranking`
    is the area under the ROC curve: the probability that an accepted token gets a higher score than a rejected one.
    """
    logits, labels = _sample(predictor, examples, generator, 4 * BATCH)
    base = torch.full_like(logits, float(torch.logit(labels.mean().clamp(1e-6, 1 - 1e-6))))
    ranks_of_agreed = 1 + (labels[logits.argsort()] > 0).nonzero().double()
    positive = labels.sum()
    negative = len(labels) - positive
    above = ranks_of_agreed.sum() - positive * (positive + 1) / 2
    return {
        "loss": float(F.binary_cross_entropy_with_logits(logits, labels)),
        "base_loss": float(F.binary_cross_entropy_with_logits(base, labels)),
        "ranking": float(above / (positive * negative)) if positive and negative else 0.5,
    }
