"""Training of an exit layer (EESD, section 3.2) and of its predictor of acceptance, or of another predictor alone.

An exit layer turns the hidden states after the target's first layers into next-token logits, and so serves as a draft model.
The first layers are frozen. The loss is the cross-entropy with the next token of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.forward_pass import BatchPass, text_pass
from specgen.engine.native.products import trained_product
from specgen.engine.parts.own_layers import (
    ExitLayers,
    ExitWeights,
    Predictor,
    check_exit,
    default_exit_depth,
    known_architecture,
    make_runners,
)
from specgen.engine.parts.trained_part import ExitDescription, open_part, replace_predictor, round_as_saved, save_exit
from specgen.engine.weights import weights_fingerprint
from specgen.train.batches import IGNORED, PackedBatch, TrainingBatches
from specgen.train.corpus import Part
from specgen.train.loop import Labels, Objective, first_shares, greedy_matches, held_out_agreement
from specgen.train.predictor import ExitOutputs, train_predictor
from specgen.train.task import TrainingObserver, TrainingTask, stop_if_requested
from specgen.train.texts import PredictedText, Text, predicted, wanted_for_predictor

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_UNUSED = ("steps", "learning_rate", "batch", "self_text")  # settings that do not matter for a predictor alone


class PredictorObjective(Objective):
    """A new predictor for the exit layer `path`, of which a copy is saved with it.

    It learns from text that the target generates for that purpose: until there is enough of it or, if the recipe has a budget in
    seconds, its share of this time is over. Documents and prompts that an exit layer is trained on are left out.
    """

    parts = (Part.PREDICTOR, Part.HELD_OUT)

    def __init__(self, target: LoadedModel, path: Path) -> None:
        super().__init__(target)
        self._part = open_part(path, target, is_exit=True)
        self._weights = self._part.load()
        self.settings = {"the exit layer": [self._part.digest]}

    def start(self, texts: Sequence[Text], task: TrainingTask, observer: TrainingObserver) -> None:
        """Does nothing: the predictor is trained when all text is there."""
        self._predicted = _predicted_texts(self.target, texts, observer)

    def finish(
        self, texts: Sequence[Text], figures: dict[str, Any], task: TrainingTask, observer: TrainingObserver
    ) -> tuple[Path, ExitDescription]:
        before = self._part.description
        assert isinstance(self._weights, ExitWeights)
        assert isinstance(before, ExitDescription)
        drafts = make_runners(self._weights, self.model, None, lambda: None).draft

        def outputs(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            output = drafts.logits(Context(ids[:1]), ids[1:])
            return output.logits.float(), output.hidden_states.float()

        predictor, measured = predictor_and_figures(outputs, self._predicted, task, observer)
        if predictor is None:
            raise SpecgenError("there is too little text to train a predictor", "Give a larger --corpus or more --prompts")
        made_with = {name: value for name, value in task.made_with().items() if name not in _UNUSED}
        description = replace(
            before,
            predictor=True,
            figures={**before.figures, **measured},
            made_with={**before.made_with, "predictor": made_with},
        )
        return replace_predictor(self._part, task.out, predictor, description), description


class ExitObjective(Objective):
    """An exit layer after the target's first `after` layers (None: a default depth), which are frozen, and its predictor.

    It has `layers` decoder layers, and begins as a copy of the target's last ones, its norm and its LM head. `own_head` trains
    the LM head as well. `target` loses its later layers.
    """

    parts = tuple(Part)

    def __init__(self, target: LoadedModel, after: int | None = None, layers: int = 1, *, own_head: bool = True) -> None:
        super().__init__(target)
        count = self.model.shape.num_layers
        self.model.check_layers("early exit")
        known_architecture(self.model, "early exit")
        self.after, self.layers, self.own_head = default_exit_depth(count) if after is None else after, layers, own_head
        check_exit(self.model, self.after, layers)
        self.settings = {"--layer": self.after, "--exit-layers": layers, "--exit-head": "own" if own_head else "target"}

    def start(self, texts: Sequence[Text], task: TrainingTask, observer: TrainingObserver) -> TrainingBatches:
        self._predicted = _predicted_texts(self.target, texts, observer)
        copies = self.model.last_layers(self.target.folder, self.layers)
        self.parameters = {name: torch.nn.Parameter(weight.to(self.device)) for name, weight in copies.items()}
        self.parameters["head.weight"].requires_grad_(self.own_head)
        self.model.free_weights(self.after)
        taught = [(text.ids, _greedy_tokens(text)) for text in texts if text.part == Part.TRAIN]
        return TrainingBatches(task, taught, (Part.TRAIN,))

    def outputs(self, batch: PackedBatch, seed: str | None) -> tuple[torch.Tensor, Labels]:
        forward_pass = batch.forward_pass()
        hidden = self._first_layers(forward_pass)
        with self.autocast():
            found = self._exit(self.layers).run_layers(hidden, forward_pass).flatten(0, 1)
        return found, (batch.labels.flatten(), batch.teacher.flatten())

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        tokens, teacher = labels
        with self.autocast():
            logits, _ = self._exit(0).norm_and_head(outputs)
        loss = F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="sum")
        return torch.cat((loss[None], greedy_matches(logits, teacher)))

    def finish(
        self, texts: Sequence[Text], figures: dict[str, Any], task: TrainingTask, observer: TrainingObserver
    ) -> tuple[Path, ExitDescription]:
        round_as_saved(self.parameters)
        layer = self._exit(self.layers)

        @torch.no_grad()
        def outputs(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            batch = text_pass(torch.tensor(ids, device=self.device))
            with self.autocast():
                logits, hidden = layer.norm_and_head(layer.run_layers(self._first_layers(batch), batch))
            return logits[0].float(), hidden[0].float()

        predictor, measured = predictor_and_figures(outputs, self._predicted, task, observer)
        description = ExitDescription(
            target=self.target.name,
            fingerprint=weights_fingerprint(self.target.folder),
            after=self.after,
            layers=self.layers,
            own_head=self.own_head,
            predictor=predictor is not None,
            figures=figures | measured,
            made_with=task.made_with(),
        )
        return save_exit(task.out, self.parameters, predictor, description), description

    def _exit(self, count: int) -> ExitLayers:
        """Returns the exit's first layers, norm and LM head with the parameters' present values."""
        return ExitLayers(self.model, count, self.parameters, trained_product)

    @torch.no_grad()
    def _first_layers(self, batch: BatchPass) -> torch.Tensor:
        """Returns the hidden states [batch, n, width] after the target's first layers, which are not trained."""
        hidden = self.model.batch(batch, self.after, with_head=False).hidden_states
        assert hidden is not None
        return hidden


def _predicted_texts(target: LoadedModel, texts: Sequence[Text], observer: TrainingObserver) -> list[PredictedText]:
    """Returns the texts that no exit layer is trained on with the target's predictions.

    Hidden states are kept of as many as the predictor needs.
    """
    found, tokens = list[PredictedText](), 0
    for text in (text for text in texts if text.part != Part.TRAIN):
        stop_if_requested(observer)
        found.append(predicted(target, text, keep_hidden=tokens < wanted_for_predictor(target)))
        tokens += len(text.ids)
    return found


def _greedy_tokens(text: Text) -> list[int]:
    """Returns the target's most probable token after each token of the text, IGNORED where that is not known."""
    if not text.greedy:
        return [IGNORED] * len(text.ids)
    return [*[IGNORED] * (text.prompt_length - 1), *text.ids[text.prompt_length :], IGNORED]


def predictor_and_figures(
    outputs: ExitOutputs, texts: Sequence[PredictedText], task: TrainingTask, observer: TrainingObserver
) -> tuple[Predictor | None, dict[str, Any]]:
    """Trains a predictor (None: there is too little text) and measures both it and the exit on held-out text."""
    observer.announce("training the predictor")
    top1 = {id(found.text): found.top_k_ids[:, 0] for found in texts}

    def ranks_of(text: Text) -> torch.Tensor:
        is_wrong = outputs(text.ids)[0].argmax(dim=-1).cpu() != top1[id(text)]
        return is_wrong[text.prompt_length - 1 : -1, None].long()

    agreement, _ = held_out_agreement([found.text for found in texts], ranks_of)
    predictor, fit = train_predictor(outputs, texts, task.recipe.seed) or (None, {})
    return predictor, {"held_out_agreement": first_shares(agreement), **({"predictor": fit} if fit else {})}
