"""Training of an exit layer (EESD, section 3.2).

An exit layer turns the hidden states after the target's first layers into next-token logits, and so serves as a draft model.
The first layers are frozen. The loss is the cross-entropy with the next token of the text.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.batch_pass import BatchPass, text_pass
from specgen.engine.exit_parts import Predictor, check_exit_depth, default_exit_depth
from specgen.engine.model import Model, TrainableExit
from specgen.engine.parts.early_exit import EarlyExit
from specgen.engine.parts.exit_files import Description, load_exit, replace_predictor, round_as_saved, save_exit
from specgen.train.corpus import Part
from specgen.train.generated_text import GeneratedText
from specgen.train.packing import IGNORED, PackedBatch
from specgen.train.predictor_training import ExitOutputs, train_predictor
from specgen.train.text_generation import Purpose, TextGeneration
from specgen.train.training_loop import (
    MAX_LOGITS,
    Labels,
    Training,
    TrainingBatches,
    autocast_for,
    greedy_agreement,
    greedy_matches,
    next_tokens,
)
from specgen.train.training_task import TrainingObserver, TrainingTask

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_UNUSED = ("steps", "learning_rate", "batch", "self_text")  # settings that do not matter for a predictor alone
_CPU_TOKENS = 256  # tokens whose logits are computed at once on a CPU: few enough for its caches


class ExitTraining(Training):
    """An exit layer in training, after the first `depth` layers of the target `model`, which are frozen.

    `own_head` trains the exit's language-model head as well; otherwise the head stays unchanged.
    """

    def __init__(
        self, model: Model, depth: int, layer: TrainableExit, batches: TrainingBatches, *, own_head: bool = True
    ) -> None:
        self.layer, self._model, self._depth = layer, model, depth
        device, vocabulary = model.device, model.vocab_size
        layer.module.to(device, torch.float32).requires_grad_(True).train()
        layer.module.get_submodule("head").requires_grad_(own_head)
        trained = {name: weight for name, weight in layer.module.named_parameters() if weight.requires_grad}
        piece_size = min(_CPU_TOKENS if device.type == "cpu" else MAX_LOGITS, max(1, MAX_LOGITS // vocabulary))
        super().__init__(trained, batches, device, vocabulary, piece_size)

    def outputs(self, batch: PackedBatch) -> tuple[torch.Tensor, Labels]:
        forward_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions)
        hidden = first_layers(self._model, self._depth, forward_pass)
        with autocast_for(self._model.device, self._model.dtype):
            return self.layer.run_layers(hidden, forward_pass).flatten(0, 1), next_tokens(batch)

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        tokens, teacher = labels
        with autocast_for(self._model.device, self._model.dtype):
            logits, _ = self.layer.norm_and_head(outputs)
        loss = F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="sum")
        return torch.cat((loss[None], greedy_matches(logits, teacher)))


@torch.no_grad()
def first_layers(model: Model, depth: int, batch: BatchPass) -> torch.Tensor:
    """Returns the hidden states [batch, n, width] after the first `depth` layers of a model, which are not trained."""
    hidden = model.batch_layers(batch, depth).hidden_states
    assert hidden is not None
    return hidden


@torch.no_grad()
def exit_outputs(model: Model, depth: int, layer: TrainableExit, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exit's next-token logits [n, vocabulary] and hidden states [n, width] after each of the token ids `ids` [n].

    The exit comes after the model's first `depth` layers.
    """
    batch = text_pass(ids.to(model.device))
    with autocast_for(model.device, model.dtype):
        hidden = layer.run_layers(first_layers(model, depth, batch), batch)
        logits, hidden = layer.norm_and_head(hidden)
    return logits[0].float(), hidden[0].float()


def exit_depth(target: LoadedModel, after: int | None) -> int:
    """Returns how many of the target's layers run before the exit: `after`, or a default if it is None.

    Raises SpecgenError if the target has too few layers or its layers cannot be run one by one.
    """
    target.model.check_layers("early exit")
    layers = target.model.shape.num_layers
    after = default_exit_depth(layers) if after is None else after
    check_exit_depth(layers, after)
    return after


def train_exit(
    target: LoadedModel,
    task: TrainingTask,
    observer: TrainingObserver,
    after: int | None = None,
    layers: int = 1,
    own_head: bool = True,
) -> tuple[Path, Description]:
    """Trains an exit layer for `target` and a predictor of whether the target accepts the exit's drafted tokens.

    The exit follows the target's first `after` layers (None: a default depth) and has `layers` decoder layers. `own_head` trains
    its head as well. Saves both in `task.out`, and returns the path of the weights and their description with measurements of
    the saved weights. `target` loses its later layers and cannot be used afterwards. Raises TrainingStopped if `observer`
    requests a stop (the same call resumes the training), and SpecgenError for an unsuitable target.
    """
    after = exit_depth(target, after)
    settings = {**task.settings(target), "after": after, "layers": layers, "own_head": own_head}
    generation = TextGeneration(target, task, settings, observer, Purpose.EXIT)
    texts = generation.run()
    layer = target.model.trainable_exit(target.folder, layers)
    target.model.free_weights(after)
    taught = [(text.ids.tolist(), text.top1.tolist()) for text in texts if text.part == Part.TRAIN]
    batches = TrainingBatches(task.corpus, taught, task.recipe.after_generation(generation.seconds))
    training = ExitTraining(target.model, after, layer, batches, own_head=own_head)
    progress = training.run(task.folder / "state.safetensors", settings, observer, task.clock)
    round_as_saved(layer.module)
    outputs = partial(exit_outputs, target.model, after, layer)
    predictor, measured = _predictor_and_figures(outputs, texts, task, observer)
    description = Description(
        target=target.name,
        fingerprint=settings["fingerprint"],
        after=after,
        layers=layers,
        own_head=own_head,
        predictor=predictor is not None,
        figures={**progress.figures(generation.seconds), **measured},
        made_with=task.made_with(),
    )
    path = save_exit(task.out, layer.module, predictor, description)
    shutil.rmtree(task.folder, ignore_errors=True)
    return path, description


def retrain_predictor(
    target: LoadedModel, exit_path: Path, task: TrainingTask, observer: TrainingObserver
) -> tuple[Path, Description]:
    """Trains a new predictor for the exit layer `exit_path`, and saves a copy of the exit layer with it in `task.out`.

    It learns from text that `target` generates for that purpose: until there is enough of it or, if the recipe has a budget in
    seconds, this time is over. Documents and prompts from which `train_exit` would train the exit layer are left out. Returns the
    path of the weights and their description with new measurements. Raises TrainingStopped if `observer` requests a stop (the
    same call resumes), and SpecgenError if the exit layer cannot be loaded or there is too little text.
    """
    trained = load_exit(exit_path, target)
    settings = {**task.settings(target), "exit": trained.description.digest}
    texts = TextGeneration(target, task, settings, observer, Purpose.PREDICTOR).run()
    drafts = EarlyExit(target.model, trained.layer, trained.description.after).draft

    def outputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, *others = ids.tolist()
        output = drafts.logits(Context([first]), others)
        assert output.hidden_states is not None
        return output.logits.float(), output.hidden_states.float()

    predictor, measured = _predictor_and_figures(outputs, texts, task, observer)
    if predictor is None:
        raise SpecgenError("there is too little text to train a predictor", "Give a larger --corpus or more --prompts")
    made_with = {name: value for name, value in task.made_with().items() if name not in _UNUSED}
    description = replace(
        trained.description,
        predictor=True,
        figures={**trained.description.figures, **measured},
        made_with={**trained.description.made_with, "predictor": made_with},
    )
    path = replace_predictor(exit_path, task.out, predictor, description)
    shutil.rmtree(task.folder, ignore_errors=True)
    return path, description


def _predictor_and_figures(
    outputs: ExitOutputs, texts: Sequence[GeneratedText], task: TrainingTask, observer: TrainingObserver
) -> tuple[Predictor | None, dict[str, Any]]:
    """Trains a predictor (None: there is too little text) and measures both it and the exit on held-out text."""
    observer.announce("training the predictor")
    agreement = greedy_agreement(lambda ids: outputs(ids)[0], [text for text in texts if text.part == Part.HELD_OUT])
    predictor, fit = train_predictor(outputs, texts, task.recipe.seed) or (None, {})
    return predictor, {"held_out_agreement": agreement, **({"predictor": fit} if fit else {})}
