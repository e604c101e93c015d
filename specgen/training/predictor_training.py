"""Train Cali-TS's predictor behind a trained exit layer (EESD, section 3.3): did exit and target agree?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from specgen.engine.exit_layer import ExitLayer, Predictor
from specgen.engine.first_layers import FirstLayers
from specgen.training.generated_text import GeneratedText
from specgen.training.training_loop import exit_rows

STEPS, BATCH, LEARNING_RATE = 600, 4096, 3e-3


@dataclass(frozen=True, slots=True)
class Fit:
    """How good a predictor is on texts that it was not trained on: cross-entropy (nats) against that of always saying the mean,
    and how often a token that was accepted is given a higher score than one that was not."""

    loss: float
    base_loss: float
    ranking: float


@dataclass(frozen=True, slots=True)
class _Examples:
    """Rows of the target [n, width] and of the exit [n, width], and whether the exit was right there [n], text behind text.
    `ends` [n] is the number of the last row of each row's text: a draft does not reach into the next one."""

    target: torch.Tensor
    draft: torch.Tensor
    right: torch.Tensor
    ends: torch.Tensor

    def at(self, begin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Target rows, exit rows and labels of drafts whose round began with the target's row `begin`: the token at place i
        comes from the exit's row i tokens further, for the last committed token lies between."""
        drafted = begin + positions
        return self.target[begin].float(), self.draft[drafted].float(), self.right[drafted].float()

    def __len__(self) -> int:
        return len(self.right)


def train_predictor(
    first: FirstLayers, layer: ExitLayer, texts: Sequence[GeneratedText], seed: int
) -> tuple[Predictor, Fit] | None:
    """Fit a predictor to the texts whose hidden rows were kept. None where there are too few of them.

    The text is the target's own, so what stands before a place was accepted: what is learned is the chance that holds then.
    """
    learned = _examples(first, layer, [text for text in texts if text.rows is not None and not text.held_out])
    kept_apart = _examples(first, layer, [text for text in texts if text.rows is not None and text.held_out])
    if learned is None or kept_apart is None:
        return None
    generator = torch.Generator(first.device).manual_seed(seed)
    predictor = Predictor(learned.target.shape[1]).to(first.device)
    with torch.no_grad():  # from the mean on, not from a half
        mean = learned.right.float().mean().clamp(1e-3, 1 - 1e-3)
        predictor.bias.fill_(float(torch.logit(mean)))
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        logits, labels = _scores(predictor, learned, generator, BATCH)
        F.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    predictor.requires_grad_(False)
    return predictor, _measure(predictor, kept_apart, generator)


def _examples(first: FirstLayers, layer: ExitLayer, texts: Sequence[GeneratedText]) -> _Examples | None:
    target, draft, right, ends = [], [], [], []
    total = 0
    for text in texts:
        if text.rows is None or len(text.ids) < 3:
            continue
        logits, hidden = exit_rows(first, layer, text.ids)
        right.append(logits.argmax(dim=-1) == text.best.to(logits.device))
        draft.append(hidden)
        target.append(text.rows.to(first.device))
        total += len(text.ids)
        ends.append(torch.full((len(text.ids),), total - 1, device=first.device))
    if not total:
        return None
    return _Examples(torch.cat(target), torch.cat(draft), torch.cat(right), torch.cat(ends))


def _scores(
    predictor: Predictor, examples: _Examples, generator: torch.Generator, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels [count] for drafts that begin anywhere, at every place alike."""
    device = examples.right.device
    begin = torch.randint(len(examples), (count,), generator=generator, device=device)
    positions = torch.randint(1, Predictor.POSITIONS + 3, (count,), generator=generator, device=device)  # some beyond the tenth
    inside = begin + positions <= examples.ends[begin]
    begin, positions = begin[inside], positions[inside]
    target_rows, draft_rows, labels = examples.at(begin, positions)
    logits = predictor.logits(predictor.offsets(target_rows), draft_rows[:, None], positions[:, None])[:, 0]
    return logits, labels


@torch.no_grad()
def _measure(predictor: Predictor, examples: _Examples, generator: torch.Generator) -> Fit:
    logits, labels = _scores(predictor, examples, generator, 4 * BATCH)
    base = torch.full_like(logits, float(torch.logit(labels.mean().clamp(1e-6, 1 - 1e-6))))
    order = logits.argsort()
    ranks = torch.empty_like(logits).scatter_(0, order, torch.arange(1, len(order) + 1, device=logits.device).float())
    positive = labels.sum()
    negative = len(labels) - positive
    above = ranks[labels > 0].double().sum() - positive * (positive + 1) / 2
    return Fit(
        float(F.binary_cross_entropy_with_logits(logits, labels)),
        float(F.binary_cross_entropy_with_logits(base, labels)),
        float(above / (positive * negative)) if positive and negative else 0.5,
    )
