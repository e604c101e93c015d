"""Training of an exit layer (EESD, section 3.2) and of its predictor of acceptance (section 3.3),
or of a new predictor alone.

An exit layer turns the hidden states after the target's first layers into next-token logits, and so
serves as a draft model. The first layers are frozen. The loss is the cross-entropy with the next
token of the text.

The predictor, which Cali-TS uses, estimates the probability that the target accepts a token that
the exit layer drafts. It is trained on texts that the exit layer was not trained on, because on
those that it was trained on it agrees with the target more often. The examples are the drafted
tokens that the target judges in simulated rounds of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.engine.forward_pass import BatchPass, text_pass
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.linear import trained_linear
from specgen.engine.parts.own_layers import (
    ExitLayers,
    Predictor,
    check_exit,
    default_exit_depth,
    exit_architecture,
)
from specgen.engine.parts.trained_part import (
    ExitDescription,
    open_part,
    part_digest,
    round_as_saved,
    save_exit,
    under,
)
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import Use
from specgen.train.loop import (
    IGNORED,
    Labels,
    Objective,
    PackedBatch,
    TrainingBatches,
    first_shares,
    held_out_agreement,
)
from specgen.train.task import TrainingTask
from specgen.train.texts import PredictedText, Text, predicted, wanted_for_predictor

# of the predictor's training
STEPS = 300
BATCH = 4096
PASSES = 4  # over each text, each with rounds of other lengths
STEP_SIZE = 0.15  # how much a step changes the scores' logits, about
# the prior's standard deviation of what one of the two hidden states adds to a score's logit
PRIOR_DEVIATION = 0.5
# settings that do not matter for a predictor alone
_UNUSED = ("steps", "learning_rate", "batch", "self_text")

# A function from n token ids to the exit's next-token logits [n, vocabulary] and hidden states [n,
# width] after each token.
ExitOutputs = Callable[[list[int]], tuple[Tensor, Tensor]]


class ExitObjective(Objective):
    """Trains an exit layer after the target's first `after` layers (None: a default depth), and its
    acceptance predictor.

    The exit layer has `layers` decoder layers, and begins as a copy of the target's last layers,
    final norm and LM head. With `own_head` the LM head is trained too. The target's weights are not
    trained; `start` frees those of its later layers.
    """

    uses = tuple(Use)

    def __init__(
        self,
        task: TrainingTask,
        target: LoadedModel,
        after: int | None = None,
        layers: int = 1,
        *,
        own_head: bool = True,
    ) -> None:
        super().__init__(task, target)
        count = self.model.shape.num_layers
        self.model.check_layers("early exit")
        exit_architecture(self.model)
        self.after = default_exit_depth(count) if after is None else after
        self.layers = layers
        self.own_head = own_head
        check_exit(self.model, self.after, layers)
        self.settings = {
            "--layer": self.after,
            "--exit-layers": layers,
            "--exit-head": "own" if own_head else "target",
        }

    def start(self, texts: Sequence[Text]) -> TrainingBatches | None:
        # texts that no exit layer is trained on
        self._predicted = list[PredictedText]()
        tokens = 0
        for text in (text for text in texts if text.use != Use.TRAIN):
            self.task.stop_if_requested()
            self._predicted.append(
                predicted(self.target, text, keep_hidden=tokens < wanted_for_predictor(self.target))
            )
            tokens += len(text.ids)
        batches = self.begin(self.initial_weights(), texts, (Use.TRAIN,))
        self.parameters["head.weight"].requires_grad_(self.own_head)
        self.model.free_weights(self.after)
        return batches

    def initial_weights(self) -> dict[str, Tensor]:
        return self.model.last_layers(self.target.folder, self.layers)

    def outputs(self, batch: PackedBatch, rng: Random) -> tuple[Tensor, Labels]:
        forward_pass = batch.forward_pass()
        hidden = self._first_layers(forward_pass)
        with self.autocast():
            states = self._exit(self.layers).run_layers(hidden, forward_pass).flatten(0, 1)
        return states, (batch.labels.flatten(),)

    def losses(self, outputs: Tensor, *labels: Tensor) -> Tensor:
        with self.autocast():
            logits, _ = self._exit(0).norm_and_head(outputs)
        return F.cross_entropy(logits.float(), labels[0], ignore_index=IGNORED, reduction="sum")

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        round_as_saved(self.parameters)
        layer = self._exit(self.layers)
        top1 = {id(prediction.text): prediction.top_k_ids[:, 0] for prediction in self._predicted}

        @torch.no_grad()
        def outputs(ids: list[int]) -> tuple[Tensor, Tensor]:
            batch = text_pass(torch.tensor(ids, device=self.device))
            with self.autocast():
                logits, hidden = layer.norm_and_head(
                    layer.run_layers(self._first_layers(batch), batch)
                )
            return logits[0].float(), hidden[0].float()

        def ranks_of(text: Text) -> Tensor:
            is_wrong = outputs(text.ids)[0].argmax(dim=-1).cpu() != top1[id(text)]
            return is_wrong[text.prompt_length - 1 : -1, None].long()

        self.task.announce("training the predictor")
        agreement, _ = held_out_agreement(
            [prediction.text for prediction in self._predicted], ranks_of
        )
        predictor, fit = train_predictor(outputs, self._predicted, self.task.recipe.seed)
        figures = {
            **figures,
            "held_out_agreement": first_shares(agreement),
            **({"predictor": fit} if fit else {}),
        }
        description = self.description(figures, has_predictor=predictor is not None)
        return save_exit(self.task.out, self.parameters, predictor, description), asdict(
            description
        )

    def description(self, figures: dict[str, Any], *, has_predictor: bool) -> ExitDescription:
        return ExitDescription(
            target=self.target.name,
            fingerprint=weights_fingerprint(self.target.folder),
            after=self.after,
            layers=self.layers,
            own_head=self.own_head,
            predictor=has_predictor,
            figures=figures,
            made_with=self.task.made_with(),
        )

    def _exit(self, count: int) -> ExitLayers:
        """Returns the exit layer with the present values of the parameters: its first `count`
        decoder layers, norm and LM head."""
        return ExitLayers(self.model, count, self.parameters, trained_linear)

    @torch.no_grad()
    def _first_layers(self, batch: BatchPass) -> Tensor:
        """Returns the hidden states [batch, n, width] after the target's first layers, which are
        not trained."""
        hidden = self.model.batch(batch, self.after, with_head=False).hidden_states
        assert hidden is not None
        return hidden


class PredictorObjective(ExitObjective):
    """Trains a new acceptance predictor for the exit layer at `path`, and saves it with a copy of
    the exit layer.

    It learns from text that the target generates now, from documents and prompts that no exit layer
    is trained on: it shall see how an exit layer behaves on unknown text. Generating ends when
    there are as many tokens as the recipe needs, or after a fixed part of its budget in seconds, if
    it has one.
    """

    uses = (Use.PREDICTOR, Use.HELD_OUT)

    def __init__(self, task: TrainingTask, target: LoadedModel, path: Path) -> None:
        self._part = open_part(path, target, is_exit=True)
        assert isinstance(self._part.description, ExitDescription)
        self._before = before = self._part.description
        super().__init__(task, target, before.after, before.layers, own_head=before.own_head)
        self.settings = {"the exit layer": part_digest(path, is_exit=True)}

    def start(self, texts: Sequence[Text]) -> None:
        super().start(texts)  # whose batches are of no use: the layer is not trained

    def initial_weights(self) -> dict[str, Tensor]:
        """Returns the weights of the exit layer, which are not trained here."""
        return self.model.last_layers(self.target.folder, 0) | under(
            "exit.", self._part.exit_tensors()
        )

    def description(self, figures: dict[str, Any], *, has_predictor: bool) -> ExitDescription:
        if not has_predictor:
            raise SpecgenError(
                "there is too little text to train a predictor",
                "Give a larger --corpus or more --prompts",
            )
        made_with = {
            name: value for name, value in self.task.made_with().items() if name not in _UNUSED
        }
        figures = {**self._before.figures, **figures}
        made_with = {**self._before.made_with, "predictor": made_with}
        return replace(self._before, predictor=True, figures=figures, made_with=made_with)


def train_predictor(
    exit_outputs: ExitOutputs, texts: Sequence[PredictedText], seed: int
) -> tuple[Predictor | None, dict[str, float]]:
    """Trains a predictor of whether the target accepts a token that the exit layer drafts. Returns
    it and its measurements.

    It is trained on the texts for the predictor (`Use`) and measured on the held-out ones; texts
    whose `hidden` is None are left out. `exit_outputs` computes the exit layer's logits and hidden
    states for a text. The measurements are those of `measure`, empty if no text is held out. The
    predictor is None if there is no text to train on. Its weights are rounded as in its file.

    The label of a token says whether exit layer and target have the same most probable token, also
    in sampled text. Sampling has another acceptance probability, which Cali-TS learns from the run
    itself (theta_hat).
    """
    rng = Random(f"rounds {seed}")
    train, held_out = (
        _examples(exit_outputs, texts, use, rng) for use in (Use.PREDICTOR, Use.HELD_OUT)
    )
    if train is None:
        return None, {}
    predictor = _fit(train, seed)
    round_as_saved(dict(predictor.named_parameters()))
    if held_out is None:
        return predictor, {}
    scores = held_out.logits(
        predictor, torch.arange(len(held_out.accepted), device=held_out.accepted.device)
    ).sigmoid()
    return predictor, measure(scores, held_out.accepted)


def judged_tokens(
    prediction: PredictedText, exit_top1: Sequence[int], continuing: float, rng: Random
) -> Iterator[tuple[int, int, int, bool]]:
    """Yields the drafted tokens that the target judges in simulated greedy rounds over a text, from
    its first generated token on.

    Each is a tuple (begin, drafted, position, accepted). `begin` and `drafted` are indices in the
    text: after token `begin` the target predicted the last token before the draft, and after token
    `drafted` the exit layer predicted the drafted token. `position` is the drafted token's position
    in its draft, from 1. `accepted`: the target predicted the same token.

    `exit_top1` [n] are the exit layer's most probable next tokens after each token of the text.
    After each drafted token the draft continues with probability `continuing`, as with a bandit. A
    round ends at the first token that is not accepted, or with the draft; the target's own token
    (the correction or bonus) follows, and then the next round. In a sampled text, a draft is
    followed only as far as the target's most probable tokens are those of the text.
    """
    ids, top1 = prediction.text.ids, prediction.top_k_ids[:, 0].tolist()
    # the last committed token: at first the one that the prefill gave
    begin = drafted = prediction.text.prompt_length
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
    """Training data of the predictor: the hidden states of all texts, one after the other, and m
    judged tokens.

    `target_states` and `exit_states` [n, width] are the hidden states of target and exit after each
    token. The other fields [m] are those of `judged_tokens`, with indices of rows.
    """

    target_states: Tensor
    exit_states: Tensor
    begins: Tensor
    drafted: Tensor
    positions: Tensor
    accepted: Tensor

    def logits(self, predictor: Predictor, chosen: Tensor) -> Tensor:
        """Returns the predictor's logits for the judged tokens with the indices `chosen`."""
        offsets = predictor.offsets(self.target_states[self.begins[chosen]].float())
        states = self.exit_states[self.drafted[chosen]].float()
        return predictor.logits(offsets, states[:, None], self.positions[chosen][:, None])[:, 0]


def _examples(
    exit_outputs: ExitOutputs, texts: Sequence[PredictedText], use: Use, rng: Random
) -> _Examples | None:
    used = [
        prediction
        for prediction in texts
        if prediction.text.use == use and prediction.hidden is not None
    ]
    top1s = list[list[int]]()
    agreed = list[Tensor]()
    exit_states = []
    target_states = []
    for prediction in used:
        assert prediction.hidden is not None
        logits, hidden = exit_outputs(prediction.text.ids)
        top1 = logits.argmax(dim=-1).cpu()
        top1s.append(top1.tolist())
        agreed.append((top1 == prediction.top_k_ids[:, 0])[prediction.text.prompt_length :])
        exit_states.append(hidden.to(prediction.hidden.dtype))
        target_states.append(prediction.hidden.to(hidden.device))
    continuing = float(torch.cat(agreed).float().mean()) if agreed else 0.0
    rows = list[tuple[int, int, int, bool]]()
    first = 0
    for prediction, exit_top1 in zip(used, top1s, strict=True):
        for _ in range(PASSES):
            for begin, drafted, position, accepted in judged_tokens(
                prediction, exit_top1, continuing, rng
            ):
                rows.append((first + begin, first + drafted, position, accepted))
        first += len(prediction.text.ids)
    if not rows:
        return None
    states = torch.cat(target_states), torch.cat(exit_states)
    return _Examples(
        *states,
        *(torch.tensor(column, device=states[0].device) for column in zip(*rows, strict=True)),
    )


def _fit(examples: _Examples, seed: int) -> Predictor:
    """Minimizes the cross-entropy of the scores, with a normal prior of mean 0 for the weights.

    The prior and the step size are relative to the size of the hidden states, which differs between
    models.
    """
    device = examples.accepted.device
    labels = examples.accepted.float()
    generator = torch.Generator(device).manual_seed(seed)
    predictor = Predictor(examples.target_states.shape[1]).to(device)
    with torch.no_grad():  # the initial prediction is the mean
        predictor.bias.fill_(float(torch.logit(labels.mean().clamp(1e-3, 1 - 1e-3))))
    groups = [{"params": [predictor.bias], "lr": STEP_SIZE / 15}]
    priors = []
    for weight, states in (
        (predictor.target_weights, examples.target_states),
        (predictor.draft_weights, examples.exit_states),
    ):
        size = float(states.float().square().sum(dim=-1).mean()) ** 0.5  # of a hidden state
        groups.append({"params": [weight], "lr": STEP_SIZE / size})
        priors.append((weight, size**2 / (2 * PRIOR_DEVIATION**2 * len(labels) / PASSES)))
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(labels), (BATCH,), generator=generator, device=device)
        loss = F.binary_cross_entropy_with_logits(
            examples.logits(predictor, chosen), labels[chosen]
        )
        loss = loss + sum(factor * weight.square().sum() for weight, factor in priors)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay.step()
    return predictor


def measure(scores: Tensor, accepted: Tensor) -> dict[str, float]:
    """Returns how well predicted acceptance probabilities `scores` [n] fit the outcomes `accepted`
    [n] (bool).

    `mean_score` and `accepted` are the means. `loss` is the cross-entropy in nats, `base_loss` that
    of always predicting the accepted share.
    """
    scores = scores.double()
    labels = accepted.double()
    share = labels.mean()
    return {
        "mean_score": float(scores.mean()),
        "accepted": float(share),
        "loss": float(F.binary_cross_entropy(scores, labels)),
        "base_loss": float(F.binary_cross_entropy(share.expand_as(labels), labels)),
    }
