"""Training of an exit layer (EESD, section 3.2): cross-entropy on text, after the frozen first layers of the target."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.decoder_layers import check_exit_depth, check_llama_structure, default_exit_depth
from specgen.engine.exit_files import Description, save_exit
from specgen.engine.exit_layer import ExitLayer, FirstLayers
from specgen.training.packing import IGNORED, PackedBatch
from specgen.training.predictor_training import Fit, train_predictor
from specgen.training.text_generation import TextGeneration
from specgen.training.training_loop import (
    MAX_LOGITS,
    Training,
    TrainingBatches,
    bfloat16_autocast,
    greedy_agreement,
    greedy_matches,
)
from specgen.training.training_task import Recipe, TrainingObserver, TrainingProgress, TrainingTask

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_CPU_TOKENS = 256  # tokens whose logits are computed at once on a CPU: few enough for its caches


@dataclass(frozen=True, slots=True)
class ExitTrainingTask(TrainingTask):
    """The exit to train: after target layer `after` (None: the default depth), with `layers` layers and maybe its own head."""

    after: int | None = None
    layers: int = 1
    own_head: bool = True


@dataclass(frozen=True, slots=True)
class ExitTrainingResult:
    """The file of the exit, its `greedy_agreement` on held-out greedy text, and the predictor's `fit`; None where there is too
    little text to measure them."""

    path: Path
    description: Description
    progress: TrainingProgress
    greedy_agreement: float | None
    fit: Fit | None
    parameters_held: int


class ExitTraining(Training):
    """An exit layer in training, after the target's first layers."""

    def __init__(
        self, first: FirstLayers, layer: ExitLayer, batches: TrainingBatches, recipe: Recipe, *, own_head: bool = True
    ) -> None:
        self.first, self.layer = first, layer
        layer.to(first.device, torch.float32).requires_grad_(True).train()
        layer.head.requires_grad_(own_head)
        trained = {name: weight for name, weight in layer.named_parameters() if weight.requires_grad}
        vocabulary: int = layer.head.weight.shape[0]  # type: ignore[union-attr,index,assignment]
        piece_size = max(1, MAX_LOGITS // vocabulary)
        if first.device.type == "cpu":
            piece_size = min(piece_size, _CPU_TOKENS)
        super().__init__(trained, batches, recipe, first.device, vocabulary, piece_size)

    @property
    def parameters_held(self) -> int:
        """The number of parameters of target and exit in memory."""
        return self.first.num_parameters + sum(weight.numel() for weight in self.layer.parameters())

    def outputs(self, batch: PackedBatch) -> torch.Tensor:
        mask = self.first.masks.batched(batch.attention_mask(), batch.positions, batch.positions, self.first.dtype)
        hidden, positions = self.first(batch.ids, batch.positions, mask)
        with bfloat16_autocast(self.first.device, self.first.dtype):
            hidden = self.layer.run_layers(hidden.float() if self.first.dtype == torch.float32 else hidden, positions, mask)
            return hidden.reshape(-1, hidden.shape[-1])

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with bfloat16_autocast(self.first.device, self.first.dtype):
            logits, _ = self.layer.norm_and_head(outputs)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return torch.cat((loss[None], greedy_matches(logits, teacher)))


@torch.no_grad()
def exit_outputs(first: FirstLayers, layer: ExitLayer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exit's logits [n, vocabulary] and hidden states [n, width] after each of `ids` [n]."""
    ids = ids[None].to(first.device)
    positions = torch.arange(ids.shape[1], device=first.device)[None]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=first.device).tril()[None]
    mask = first.masks.batched(causal, positions, positions, first.dtype)
    with bfloat16_autocast(first.device, first.dtype):
        logits, hidden_states = layer(*first(ids, positions, mask), mask)
    return logits[0].float(), hidden_states[0].float()


def exit_depth(target: LoadedModel, after: int | None) -> int:
    """The number of target layers before the exit, `after` or the default. Raises SpecgenError if the target has too few layers
    or its layers cannot be run one by one."""
    check_llama_structure(target.model)
    after = default_exit_depth(target.model) if after is None else after
    check_exit_depth(target.model, after)
    return after


def train_exit(target: LoadedModel, task: ExitTrainingTask, observer: TrainingObserver) -> ExitTrainingResult:
    """Train an exit layer and its predictor, and save them in `task.out`. `target` is cut down and cannot be used afterwards.

    Raises TrainingStopped if the observer requests a stop (the same call resumes), SpecgenError for an unsuitable target.
    """
    after = exit_depth(target, task.after)
    settings = {**task.settings(target), "after": after, "layers": task.layers, "own_head": task.own_head}
    generation = TextGeneration(target, task, settings, observer)
    texts = generation.run()
    layer = ExitLayer.of(target.model, task.layers)
    first = FirstLayers(target.model, after)
    recipe = task.recipe.after_generation(generation.seconds)
    taught = [(text.ids.tolist(), text.top1.tolist()) for text in texts if not text.held_out]
    batches = TrainingBatches(task.corpus, taught, recipe)
    training = ExitTraining(first, layer, batches, recipe, own_head=task.own_head)
    progress = training.run(task.folder / "state.safetensors", settings, observer, task.clock)
    layer.requires_grad_(False).eval()
    observer.announce("training the predictor")
    outputs = partial(exit_outputs, first, layer)
    agreement = greedy_agreement(lambda ids: outputs(ids)[0], [text for text in texts if text.held_out])
    predictor, fit = train_predictor(outputs, texts, task.recipe.seed) or (None, None)
    description = Description(
        target=target.name,
        fingerprint=settings["fingerprint"],
        after=after,
        layers=task.layers,
        own_head=task.own_head,
        predictor=predictor is not None,
        figures={
            **progress.figures(generation.seconds),
            "agreement_on_own_text": agreement,
            **({} if fit is None else {"predictor": asdict(fit)}),
        },
        made_with=task.made_with(),
    )
    path = save_exit(task.out, layer, predictor, description)
    shutil.rmtree(task.folder, ignore_errors=True)
    return ExitTrainingResult(path, description, progress, agreement["greedy"], fit, training.parameters_held)
