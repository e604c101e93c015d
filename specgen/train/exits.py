"""Training of an exit layer (EESD, section 3.2) and of its predictor of acceptance (section 3.3),
or of a new predictor alone.

An exit layer turns the hidden states after the target's first layers, joined with the target's last
state of the token before, into next-token logits, and so serves as a draft model. For drafted
tokens, the exit's own last state of the token before stands in for the target's: it is trained with
drafts of one to five tokens, which are those of the text. The first layers are frozen. The loss
is the divergence from the target's own predictions.

It begins as a linear map to the target's last state, which is solved for by least squares, with
decoder layers that add nothing at first (their output projections are zero).

The predictor, which Cali-TS uses, estimates the probability that the target accepts a token that
the exit layer drafts. It is trained on texts that the exit layer was not trained on, because on
those that it was trained on it agrees with the target more often. The examples are the drafted
tokens that the target judges in simulated rounds of greedy decoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.engine.forward_pass import text_pass
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import EXIT_HEAD, FINAL_NORM
from specgen.engine.native.linear import trained_linear
from specgen.engine.parts.eagle import UnrolledAttention
from specgen.engine.parts.own_layers import (
    JOIN,
    JOIN_BIAS,
    VOCABULARY,
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
from specgen.train.loop import PackedBatch, TrainingBatches, held_out_agreement
from specgen.train.start import LinearMap, ridge_path
from specgen.train.states import Predictions, StatesObjective, TargetStates, reachable
from specgen.train.target_layer import silence
from specgen.train.task import TrainingTask
from specgen.train.texts import PredictedText, Text, wanted_for_predictor

# of the predictor's training
STEPS = 300
_TIMED_STEPS = 3
BATCH = 4096
PASSES = 4  # over each text, each with rounds of other lengths
STEP_SIZE = 0.15  # how much a step changes the scores' logits, about
# the prior's standard deviation of what one of the two hidden states adds to a score's logit
PRIOR_DEVIATION = 0.5
_SCALES = (0.5, 0.7, 0.85, 1.0)  # of the logits at the beginning: a mean of states is no state
_CHOOSING = 8  # one training text in so many chooses the start, and is not solved for,
_FEWEST_TEXTS = 4  # if there are so many texts
_CHOOSING_TOKENS = 512  # at most
# settings that do not matter for a predictor alone
_UNUSED = ("steps", "learning_rate", "batch", "self_text")

# A function from n token ids to the ids of the exit's most probable next tokens [depths, n] and its
# hidden states [depths, n, width]: those at index d are after each token as the d-th drafted one
# (0: the last one before a draft).
ExitOutputs = Callable[[list[int]], tuple[Tensor, Tensor]]


class UnrolledExitLayer(NativeLayer):
    """A decoder layer of an exit in training, where each call drafts one more token after each
    prefix of a text."""

    attention = UnrolledAttention


class ExitObjective(StatesObjective):
    """Trains an exit layer after the target's first `after` layers (None: a default depth), and its
    acceptance predictor.

    The exit layer has `layers` decoder layers, which begin as copies of the target's last layers
    but for their output projections. With `own_head` it has an LM head of its own, which begins as
    the target's and knows the most frequent tokens of a large vocabulary.
    """

    uses = tuple(Use)
    trained_uses = (Use.TRAIN,)
    depths = 5

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
        self.taps = (self.after,)
        self.layers = layers
        self.own_head = self.reduces_head = own_head
        check_exit(self.model, self.after, layers)
        self.settings = {
            "--layer": self.after,
            "--exit-layers": layers,
            "--exit-head": "own" if own_head else "target",
        }

    def start(self, texts: Sequence[Text]) -> TrainingBatches | None:
        batches = super().start(texts)
        self.parameters[EXIT_HEAD].requires_grad_(self.own_head)
        return batches

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        architecture = exit_architecture(self.model)
        made = self.model.last_layers(self.target.folder, self.layers)
        made[EXIT_HEAD] = self.head_start()
        offset = architecture.norm_weight_offset
        for index in range(self.layers):
            silence(made, architecture, index)
        gain = made[FINAL_NORM] + offset
        used = [text for text in texts if text.use == Use.TRAIN]
        count = max(1, len(used) // _CHOOSING) if len(used) >= _FEWEST_TEXTS else 0
        choosing = used[len(used) - count :]
        starts = self._starts(used[: len(used) - count], gain, self._raw_size(used))

        best: tuple[float, dict[str, Tensor]] | None = None
        for start in starts if count else starts[:1]:
            own = {JOIN: start.weight, JOIN_BIAS: start.bias}
            self.parameters = {
                name: torch.nn.Parameter(weight.to(self.device))
                for name, weight in (made | own).items()
            }
            for scale, loss in self._start_losses(choosing).items():
                if best is None or loss < best[0]:
                    best = loss, own | {FINAL_NORM: gain * scale - offset}
        assert best is not None
        return made | best[1]

    @torch.no_grad()
    def _start_losses(self, texts: Sequence[Text]) -> dict[float, float]:
        """Returns the cross-entropy of the present parameters with the target, in nats, on some of
        the texts' answers, with each of several scales of the final norm. Decoder layers are left
        out, which add nothing yet."""
        exit_layers = self._exit(0)
        joined = []
        labels = []
        tokens = 0
        for text in texts:
            if tokens >= _CHOOSING_TOKENS:
                break
            batch = self.whole(text.ids, text.prompt_length, self.teacher(text))
            states = self.states(batch)
            chosen = reachable(batch, 0)[0]
            tokens += len(chosen)
            features = states.features.flatten(0, 1)[chosen]
            before = _before(batch, states.hidden).flatten(0, 1)[chosen]
            joined.append(exit_layers.joined(features, before))
            labels.append([rows[chosen] for rows in self.labels_of(batch, states)])
        if not tokens:
            return {1.0: 0.0}
        last = exit_layers.last_states(torch.cat(joined))
        of_rows = [torch.cat(rows) for rows in zip(*labels, strict=True)]
        losses = {}
        for scale in _SCALES:
            logits = exit_layers.head_logits(last * scale).float()
            losses[scale] = float(self.entropies(logits, *of_rows).mean())
        return losses

    def _starts(self, texts: Sequence[Text], gain: Tensor, size: float) -> list[LinearMap]:
        """Returns maps of what is joined to the target's last state before the final norm's `gain`,
        of root mean square `size`. With enough text the first are by least squares on all of it;
        then come those that read less: the state alone, and the state itself."""
        width = self.width
        itself = torch.eye(width, 2 * width, device=self.device)
        starts = [LinearMap(itself, torch.zeros(width, device=self.device))]
        pairs = self._pairs(texts, gain)
        if pairs is not None:
            inputs, outputs = pairs
            alone = [
                found._replace(weight=F.pad(found.weight, (0, width)))
                for found in ridge_path(inputs[:, :width], outputs).values()
            ]
            starts = [*ridge_path(inputs, outputs).values(), *alone, *starts]
        return [LinearMap(start.weight * size, start.bias * size) for start in starts]

    def _pairs(self, texts: Sequence[Text], gain: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns what least squares read: the join's inputs [tokens, 2 * width], and the target's
        last states before the final norm's `gain` [tokens, width]. None without text."""
        inputs = []
        outputs = []
        for batch, states in self.solved_for(texts):
            chosen = reachable(batch, 0)[0]
            inputs.append(self._joined_inputs(batch, states)[chosen])
            outputs.append((states.hidden / gain.to(self.device)).flatten(0, 1)[chosen])
        return (torch.cat(inputs), torch.cat(outputs)) if inputs else None

    def _raw_size(self, texts: Sequence[Text]) -> float:
        """Returns the root mean square of the states that enter the target's last layer: the size
        at which that layer's weights are learned best. Neither the norm before it nor the final
        norm depends on it."""
        if not texts:
            return 1.0
        ids = torch.tensor(texts[0].ids, device=self.device)
        last = self.num_layers - 1
        tapped = self.model.batch(text_pass(ids), taps=[last], with_head=False).features
        assert tapped is not None
        return float(tapped[0].float().square().mean(-1).sqrt().median().clamp_min(1e-6))

    def _joined_inputs(self, batch: PackedBatch, states: TargetStates) -> Tensor:
        """Returns what the join reads [tokens, 2 * width] of a batch: normed states."""
        pairs = torch.stack((states.features, _before(batch, states.hidden)), dim=2)
        eps = exit_architecture(self.model).norm_eps
        return F.rms_norm(pairs, pairs.shape[-1:], None, eps).flatten(2).flatten(0, 1)

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the exit once per depth. At depth 0 it reads the target's last states, then its own
        of the depth before. An exit of format 1 reads none and runs once.

        A step's drafts have a random number of tokens: with the mean number in every step, later
        tokens would never be learned.
        """
        exit_layers = self._exit(self.layers, UnrolledExitLayer)
        forward_pass = batch.forward_pass()
        before = _before(batch, states.hidden).flatten(0, 1)
        out = torch.empty(0)
        rows = []
        count = self.depths if rng is None else rng.randint(1, self.depths)
        for depth in range(count):
            hidden = F.pad(states.features[:, depth:], (0, 0, 0, depth)).flatten(0, 1)
            earlier, sources = reachable(batch, depth)
            if exit_layers.is_joined:
                at = batch.positions + depth
                entering = exit_layers.joined(hidden, before)
                shifted = forward_pass._replace(positions=at, key_positions=at)
                out = exit_layers.run_layers(entering, shifted).float()
                before = exit_layers.last_states(out)
                chosen = out.index_select(0, earlier)
            else:
                if depth == 0:
                    out = exit_layers.run_layers(hidden, forward_pass)
                chosen = out.index_select(0, sources)
            rows.append((chosen, sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        return self._exit(0).norm_and_head(outputs)[0].float()

    def closing_seconds(self, measuring: float, texts: Sequence[Text]) -> float:
        """The exit is run on the predictor's texts too, and the predictor is fitted."""
        tokens = Counter[Use]()
        for text in texts:
            tokens[text.use] += len(text.ids)
        share = tokens[Use.PREDICTOR] / max(1, tokens[Use.HELD_OUT])
        return super().closing_seconds(measuring * (2 + share), texts) + fit_seconds(
            self.width, self.device
        )

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        round_as_saved(self.parameters)
        self.task.announce("training the predictor")
        agreement, _ = held_out_agreement(texts, self.ranks_of)
        used = list[PredictedText]()
        tokens = 0
        for text in (text for text in texts if text.use != Use.TRAIN):
            self.task.stop_if_requested()
            is_kept = tokens < wanted_for_predictor(self.target)
            used.append(self.predicted(text, keep_hidden=is_kept))
            tokens += len(text.ids)
        predictor, fit = train_predictor(self.exit_outputs, used, self.task.recipe.seed)
        figures = {
            **figures,
            "held_out_agreement": agreement,
            "cross_entropy": self.cross_entropy(texts),
            **({"predictor": fit} if fit else {}),
        }
        description = self.description(figures, has_predictor=predictor is not None)
        tensors: dict[str, Tensor] = dict(self.parameters)
        if self.ids is not None:
            tensors[VOCABULARY] = self.ids
        return save_exit(self.task.out, tensors, predictor, description), asdict(description)

    @torch.no_grad()
    def exit_outputs(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """See `ExitOutputs`. After the last token, both are zero."""
        batch = self.whole(ids, 1, self.teacher(Text(ids, 1, False, Use.PREDICTOR)))
        with self.autocast():
            found = self.predict(batch, self.states(batch), None)
            logits, states = self._exit(0).norm_and_head(found.outputs)
        likeliest = logits.argmax(dim=-1)
        if self.ids is not None:
            likeliest = self.ids[likeliest]
        shape = self.depths, len(ids)
        top1 = torch.zeros(shape, dtype=torch.long, device=self.device)
        top1[found.depths, found.sources] = likeliest
        hidden = torch.zeros(*shape, states.shape[-1], device=self.device)
        hidden[found.depths, found.sources] = states.float()
        return top1, hidden

    def description(self, figures: dict[str, Any], *, has_predictor: bool) -> ExitDescription:
        return ExitDescription(
            target=self.target.name,
            fingerprint=weights_fingerprint(self.target.folder),
            after=self.after,
            layers=self.layers,
            own_head=self.own_head,
            joined=True,
            vocabulary=None if self.ids is None else len(self.ids),
            predictor=has_predictor,
            figures=figures,
            made_with=self.task.made_with(),
        )

    def _exit(self, count: int, make_layer: type[NativeLayer] = NativeLayer) -> ExitLayers:
        """Returns the exit layer with the present values of the parameters: its first `count`
        decoder layers, norm and LM head."""
        return ExitLayers(self.model, count, self.parameters, trained_linear, make_layer)


def _before(batch: PackedBatch, hidden: Tensor) -> Tensor:
    """Returns the states [batch, n, width] of the tokens before each token, zeros at the beginnings
    of texts."""
    shifted = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    return shifted * (batch.positions > 0)[:, :, None]


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
        self.reduces_head = False
        self.settings = {"the exit layer": part_digest(path, is_exit=True)}

    def start(self, texts: Sequence[Text]) -> TrainingBatches | None:
        super().start(texts)  # whose batches are of no use: the layer is not trained
        return None

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the weights of the exit layer, which are not trained here."""
        own = under("exit.", self._part.exit_tensors())
        if (ids := own.pop(VOCABULARY, None)) is not None:
            self.ids = ids.to(self.device)
        return self.model.last_layers(self.target.folder, 0) | own

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
    whose `hidden` is None are left out. `exit_outputs` computes the exit layer's most probable
    tokens and hidden states for a text. The measurements are those of `measure`, empty if no text
    is held out. The predictor is None if there is no text to train on. Its weights are rounded as
    in its file.

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
    prediction: PredictedText, exit_top1: Sequence[Sequence[int]], continuing: float, rng: Random
) -> Iterator[tuple[int, int, int, bool]]:
    """Yields the drafted tokens that the target judges in simulated greedy rounds over a text, from
    its first generated token on.

    Each is a tuple (begin, drafted, position, accepted). `begin` and `drafted` are indices in the
    text: after token `begin` the target predicted the last token before the draft, and after token
    `drafted` the exit layer predicted the drafted token. `position` is the drafted token's position
    in its draft, from 1. `accepted`: the target predicted the same token.

    `exit_top1` [depths, n] are the exit layer's most probable next tokens after each token of the
    text, as the last one before a draft, as the first drafted one, and so on (later ones are as the
    last of these).
    After each drafted token the draft continues with probability `continuing`, as with a bandit. A
    round ends at the first token that is not accepted, or with the draft; the target's own token
    (the correction or bonus) follows, and then the next round. In a sampled text, a draft is
    followed only as far as the target's most probable tokens are those of the text.
    """
    ids, top1 = prediction.text.ids, prediction.top_k_ids[:, 0].tolist()
    # the last committed token: at first the one that the prefill gave
    begin = drafted = prediction.text.prompt_length
    while drafted < len(ids) - 1:
        after = exit_top1[min(drafted - begin, len(exit_top1) - 1)]
        accepted = after[drafted] == top1[drafted]
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

    `target_states` [n, width] are the target's hidden states after each token, `exit_states` [k,
    width] the exit's, of each depth one after the other. The other fields [m] are those of
    `judged_tokens`, with indices of rows.
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
    top1s = list[list[list[int]]]()
    agreed = list[Tensor]()
    exit_states = []
    target_states = []
    for prediction in used:
        assert prediction.hidden is not None
        likeliest, hidden = exit_outputs(prediction.text.ids)
        top1 = likeliest.cpu()
        top1s.append(top1.tolist())
        agreed.append((top1[0] == prediction.top_k_ids[:, 0])[prediction.text.prompt_length :])
        exit_states.append(hidden.flatten(0, 1).to(prediction.hidden.dtype))
        target_states.append(prediction.hidden.to(hidden.device))
    continuing = float(torch.cat(agreed).float().mean()) if agreed else 0.0
    rows = list[tuple[int, int, int, bool]]()
    first = 0
    first_of_exit = 0
    for prediction, exit_top1 in zip(used, top1s, strict=True):
        length = len(prediction.text.ids)
        for _ in range(PASSES):
            for begin, drafted, position, accepted in judged_tokens(
                prediction, exit_top1, continuing, rng
            ):
                depth = min(position, len(exit_top1)) - 1
                own = first_of_exit + depth * length + drafted
                rows.append((first + begin, own, position, accepted))
        first += length
        first_of_exit += len(exit_top1) * length
    if not rows:
        return None
    states = torch.cat(target_states), torch.cat(exit_states)
    return _Examples(
        *states,
        *(torch.tensor(column, device=states[0].device) for column in zip(*rows, strict=True)),
    )


def fit_seconds(width: int, device: torch.device) -> float:
    """Estimates how many seconds the fit of a predictor takes, for states of this width, by some of
    its steps."""
    states = torch.ones(BATCH, width, device=device)
    rows = torch.arange(BATCH, device=device)
    examples = _Examples(states, states, rows, rows, rows % 4 + 1, rows % 2 == 0)
    _fit(examples, 0, 1)
    start = time.monotonic()
    _fit(examples, 0, _TIMED_STEPS)
    return (time.monotonic() - start) * STEPS / _TIMED_STEPS


def _fit(examples: _Examples, seed: int, steps: int | None = None) -> Predictor:
    """Minimizes the cross-entropy of the scores, with a normal prior of mean 0 for the weights.

    The prior and the step size are relative to the size of the hidden states, which differs between
    models.
    """
    steps = steps or STEPS
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
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
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
