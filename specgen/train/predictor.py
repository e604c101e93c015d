"""Training of the acceptance predictor that EESD's method Cali-TS uses with an exit layer (EESD, section 3.3).

The predictor estimates the probability that the target accepts a token that the exit layer drafts. It is trained on texts that
the exit layer was not trained on (on the others, the two agree more often), and on the drafted tokens that the target judges in
simulated rounds of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.parts.own_layers import Predictor
from specgen.engine.parts.trained_part import round_as_saved
from specgen.train.corpus import Part
from specgen.train.texts import PredictedText

STEPS, BATCH = 300, 4096
PASSES = 4  # over each text, each with rounds of other lengths
STEP_SIZE = 0.15  # how much a step changes the scores' logits, about
PRIOR_DEVIATION = 0.5  # of the part of a score's logit that comes from one of the two hidden states, before training
CALIBRATION_BINS = 10

ExitOutputs = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]
"""A function from n token ids to the exit's next-token logits [n, vocabulary] and hidden states [n, width] after each token."""


def train_predictor(
    exit_outputs: ExitOutputs, texts: Sequence[PredictedText], seed: int
) -> tuple[Predictor, dict[str, float]] | None:
    """Trains a predictor of whether the target accepts a token that the exit drafts. Returns it and its measurements.

    It is trained on the texts whose part is PREDICTOR and measured on the held-out ones, both only where `hidden` is not None.
    `exit_outputs` computes the exit's logits and hidden states for a text. The measurements are those of `measure`; there are
    none if no text is held out. Returns None if there is no text to train on. The predictor has the values that a file keeps.

    A label says whether exit and target have the same most probable token, also for sampled text. When sampling, the acceptance
    probability is another one, which Cali-TS learns from the run itself (theta_hat).
    """
    rng = Random(f"rounds {seed}")
    train, held_out = (_examples(exit_outputs, texts, part, rng) for part in (Part.PREDICTOR, Part.HELD_OUT))
    if train is None:
        return None
    predictor = _fit(train, seed)
    round_as_saved(dict(predictor.named_parameters()))
    if held_out is None:
        return predictor, {}
    scores = held_out.logits(predictor, torch.arange(len(held_out.accepted), device=held_out.accepted.device)).sigmoid()
    return predictor, measure(scores, held_out.accepted)


def judged_tokens(
    found: PredictedText, exit_top1: Sequence[int], continuing: float, rng: Random
) -> Iterator[tuple[int, int, int, bool]]:
    """Yields the judged tokens of greedy rounds over a text, from the first generated token on.

    Each is a tuple of the token after which the target predicted the last committed one, the token after which the exit predicted
    the drafted one (both as indices in the text), the latter's position in its draft, from 1, and whether the target predicted
    the same.

    `exit_top1` [n] are the exit's most probable next tokens after each token of the text. After each drafted token the draft
    continues with probability `continuing`, as with a bandit. A round ends at the first token that is not accepted, or with the
    draft; the target's own token (the correction or bonus) follows, and then the next round. In a sampled text, a draft can be
    followed only as far as the target's most probable tokens are those of the text.
    """
    ids, top1 = found.text.ids, found.top_k_ids[:, 0].tolist()
    begin = drafted = found.text.prompt_length  # the last committed token: at first the one that the prefill gave
    while drafted < len(ids) - 1:
        accepted = exit_top1[drafted] == top1[drafted]
        yield begin - 1, drafted, drafted - begin + 1, accepted
        drafted += 1
        if not accepted or top1[drafted - 1] != ids[drafted]:
            begin = drafted  # the correction, or the sampled token
        elif rng.random() >= continuing:
            begin = drafted = drafted + 1  # the bonus token


@dataclass(frozen=True, slots=True)
class _Examples:
    """Training data of the predictor: the hidden states of all texts, one after the other, and m judged tokens.

    `target_states` and `exit_states` [n, width] are the hidden states of target and exit after each token. The other fields [m]
    are those of `judged_tokens`, with indices of rows.
    """

    target_states: torch.Tensor
    exit_states: torch.Tensor
    begins: torch.Tensor
    drafted: torch.Tensor
    positions: torch.Tensor
    accepted: torch.Tensor

    def logits(self, predictor: Predictor, chosen: torch.Tensor) -> torch.Tensor:
        """Returns the predictor's logits for the judged tokens with the indices `chosen`."""
        offsets = predictor.offsets(self.target_states[self.begins[chosen]].float())
        states = self.exit_states[self.drafted[chosen]].float()
        return predictor.logits(offsets, states[:, None], self.positions[chosen][:, None])[:, 0]


def _examples(exit_outputs: ExitOutputs, texts: Sequence[PredictedText], part: Part, rng: Random) -> _Examples | None:
    used, top1s, exit_states, target_states = list[PredictedText](), list[torch.Tensor](), [], []
    for found in texts:
        if found.text.part == part and found.hidden is not None:
            logits, hidden = exit_outputs(found.text.ids)
            used.append(found)
            top1s.append(logits.argmax(dim=-1).cpu())
            exit_states.append(hidden.to(found.hidden.dtype))
            target_states.append(found.hidden.to(hidden.device))
    pairs = list(zip(used, top1s, strict=True))
    agreed = [(top1 == found.top_k_ids[:, 0])[found.text.prompt_length :] for found, top1 in pairs]
    continuing = float(torch.cat(agreed).float().mean()) if agreed else 0.0
    rows, first = list[tuple[int, int, int, bool]](), 0
    for found, top1 in pairs:
        for _ in range(PASSES):
            judged = judged_tokens(found, top1.tolist(), continuing, rng)
            rows += [(first + begin, first + drafted, *others) for begin, drafted, *others in judged]  # type: ignore[misc]
        first += len(found.text.ids)
    if not rows:
        return None
    states = torch.cat(target_states), torch.cat(exit_states)
    return _Examples(*states, *(torch.tensor(column, device=states[0].device) for column in zip(*rows, strict=True)))


def _fit(examples: _Examples, seed: int) -> Predictor:
    """Minimizes the cross-entropy of the scores, with a normal prior of mean 0 for the weights.

    The prior and the step size are relative to the size of the hidden states, which differs between models.
    """
    device, width = examples.accepted.device, examples.target_states.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    predictor = Predictor(width).to(device)
    labels = examples.accepted.float()
    with torch.no_grad():  # the initial prediction is the mean
        predictor.bias.fill_(float(torch.logit(labels.mean().clamp(1e-3, 1 - 1e-3))))
    groups, priors = [{"params": [predictor.bias], "lr": STEP_SIZE / 15}], []
    for weight, states in ((predictor.target_weights, examples.target_states), (predictor.draft_weights, examples.exit_states)):
        size = float(states.float().square().sum(dim=-1).mean()) ** 0.5  # of a hidden state
        groups.append({"params": [weight], "lr": STEP_SIZE / size})
        priors.append((weight, size**2 / (2 * PRIOR_DEVIATION**2 * len(labels) / PASSES)))
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(labels), (BATCH,), generator=generator, device=device)
        loss = F.binary_cross_entropy_with_logits(examples.logits(predictor, chosen), labels[chosen])
        loss = loss + sum(factor * weight.square().sum() for weight, factor in priors)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay.step()
    return predictor


def measure(scores: torch.Tensor, accepted: torch.Tensor) -> dict[str, float]:
    """Returns how well predicted acceptance probabilities `scores` [n] fit the outcomes `accepted` [n] (bool).

    `mean_score` and `accepted` are the means. `calibration_error` is the expected calibration error: the mean distance between
    the scores' mean and the accepted share in CALIBRATION_BINS equal intervals of the score, weighted by their sizes. `brier` is
    the mean squared error, `base_brier` that of always predicting the accepted share; `loss` and `base_loss` are the same for the
    cross-entropy in nats. `ranking` is the area under the ROC curve: the probability that an accepted token has a higher score
    than a rejected one.
    """
    scores, labels = scores.double(), accepted.double()
    bins = (scores * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.double, device=scores.device).index_add_(0, bins, scores - labels)
    share = labels.mean()
    base = torch.full_like(labels, float(share))
    ranks_of_accepted = 1 + (labels[scores.argsort()] > 0).nonzero().double()
    positive = labels.sum()
    negative = len(labels) - positive
    above = ranks_of_accepted.sum() - positive * (positive + 1) / 2
    return {
        "mean_score": float(scores.mean()),
        "accepted": float(share),
        "calibration_error": float(gaps.abs().sum() / len(labels)),
        "brier": float(F.mse_loss(scores, labels)),
        "base_brier": float(F.mse_loss(base, labels)),
        "loss": float(F.binary_cross_entropy(scores, labels)),
        "base_loss": float(F.binary_cross_entropy(base, labels)),
        "ranking": float(above / (positive * negative)) if positive and negative else 0.5,
    }
