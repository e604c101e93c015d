"""Training of Cali-TS's acceptance predictor for a trained exit layer (EESD, section 3.3): do exit and target agree?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.exit_layer import Predictor
from specgen.training.generated_text import GeneratedText

STEPS, BATCH, LEARNING_RATE = 600, 4096, 3e-3

ExitOutputs = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the exit's logits [n, vocabulary] and hidden states [n, width] after each of some ids [n]."""


@dataclass(frozen=True, slots=True)
class _Examples:
    """Hidden states of the target and of the exit, each [n, width], and whether the exit agreed with the target [n], for the
    tokens of all texts. `ends` [n] has the index of the last token of each token's text."""

    target_states: torch.Tensor
    exit_states: torch.Tensor
    agreed: torch.Tensor
    ends: torch.Tensor


def train_predictor(
    exit_outputs: ExitOutputs, texts: Sequence[GeneratedText], seed: int
) -> tuple[Predictor, dict[str, float]] | None:
    """Fit a predictor to the texts that have hidden states, and measure it on held-out ones; None if there are too few of them.

    A text holds the target's own tokens, so all tokens before a position count as accepted: what is learned is the conditional
    probability that the token at this position is accepted too.
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
    """Logits and labels of at most `count` drafted tokens, at uniformly random positions of drafts that start anywhere."""
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
    """`loss` is the predictor's cross-entropy in nats, `base_loss` that of a constant prediction of the mean, `ranking` the area
    under the ROC curve: how often an accepted token scores higher than a rejected one."""
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
