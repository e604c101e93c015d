"""Training of an exit layer (EESD, section 3.2).

An exit layer turns the hidden states after the target's first layers into next-token logits, and so serves as a draft model.
The first layers are frozen. The loss is the cross-entropy with the next token of the text.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from specgen.engine.exit_files import Description, save_exit
from specgen.engine.exit_parts import check_exit_depth, default_exit_depth
from specgen.engine.transformers_backend.exit_layer import ExitLayer, FirstLayers
from specgen.engine.transformers_backend.reference import transformers_module
from specgen.training.packing import IGNORED, PackedBatch
from specgen.training.predictor_training import train_predictor
from specgen.training.text_generation import TextGeneration
from specgen.training.training_loop import MAX_LOGITS, Training, TrainingBatches, autocast_for, greedy_agreement, greedy_matches
from specgen.training.training_task import TrainingObserver, TrainingTask

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_CPU_TOKENS = 256  # tokens whose logits are computed at once on a CPU: few enough for its caches


class ExitTraining(Training):
    """An exit layer in training. `first` are the target's first layers, which are frozen.

    `own_head` trains the exit's language-model head as well; otherwise the head stays unchanged.
    """

    def __init__(self, first: FirstLayers, layer: ExitLayer, batches: TrainingBatches, *, own_head: bool = True) -> None:
        self.first, self.layer = first, layer
        layer.to(first.device, torch.float32).requires_grad_(True).train()
        layer.head.requires_grad_(own_head)
        trained = {name: weight for name, weight in layer.named_parameters() if weight.requires_grad}
        vocabulary: int = layer.head.weight.shape[0]  # type: ignore[union-attr,index,assignment]
        piece_size = min(_CPU_TOKENS if first.device.type == "cpu" else MAX_LOGITS, max(1, MAX_LOGITS // vocabulary))
        super().__init__(trained, batches, first.device, vocabulary, piece_size)

    def outputs(self, batch: PackedBatch) -> torch.Tensor:
        mask = self.first.masks.batched(batch.attention_mask(), batch.positions, batch.positions, self.first.dtype)
        hidden, positions = self.first(batch.ids, batch.positions, mask)
        with autocast_for(self.first.device, self.first.dtype):
            hidden = self.layer.run_layers(hidden.float() if self.first.dtype == torch.float32 else hidden, positions, mask)
            return hidden.reshape(-1, hidden.shape[-1])

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with autocast_for(self.first.device, self.first.dtype):
            logits, _ = self.layer.norm_and_head(outputs)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return torch.cat((loss[None], greedy_matches(logits, teacher)))


@torch.no_grad()
def exit_outputs(first: FirstLayers, layer: ExitLayer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exit's next-token logits [n, vocabulary] and hidden states [n, width] after each of the token ids `ids` [n]."""
    ids = ids[None].to(first.device)
    positions = torch.arange(ids.shape[1], device=first.device)[None]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=first.device).tril()[None]
    mask = first.masks.batched(causal, positions, positions, first.dtype)
    with autocast_for(first.device, first.dtype):
        logits, hidden_states = layer(*first(ids, positions, mask), mask)
    return logits[0].float(), hidden_states[0].float()


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
    its head as well. Saves both in `task.out`, and returns the path of the weights and their description with measurements.
    `target` loses its later layers and cannot be used afterwards. Raises TrainingStopped if `observer` requests a stop (the same
    call resumes the training), and SpecgenError for an unsuitable target.
    """
    after = exit_depth(target, after)
    settings = {**task.settings(target), "after": after, "layers": layers, "own_head": own_head}
    generation = TextGeneration(target, task, settings, observer)
    texts = generation.run()
    layer = ExitLayer.of(transformers_module(target), layers)
    first = FirstLayers(transformers_module(target), after)
    taught = [(text.ids.tolist(), text.top1.tolist()) for text in texts if not text.held_out]
    batches = TrainingBatches(task.corpus, taught, task.recipe.after_generation(generation.seconds))
    training = ExitTraining(first, layer, batches, own_head=own_head)
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
        layers=layers,
        own_head=own_head,
        predictor=predictor is not None,
        figures={
            **progress.figures(generation.seconds),
            "agreement_on_own_text": agreement,
            **({} if fit is None else {"predictor": fit}),
        },
        made_with=task.made_with(),
    )
    path = save_exit(task.out, layer, predictor, description)
    shutil.rmtree(task.folder, ignore_errors=True)
    return path, description
