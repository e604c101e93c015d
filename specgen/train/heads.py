"""Trains a head for a target from text to files: generates text, trains, measures and saves."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import TYPE_CHECKING

from specgen.engine.parts.exit_files import round_as_saved
from specgen.engine.parts.head_description import HeadDescription, describe_head
from specgen.engine.parts.head_files import check_head_folder, save_head
from specgen.train.corpus import Part
from specgen.train.frozen_target import FrozenTarget
from specgen.train.head_agreement import held_out
from specgen.train.head_objective import Objective
from specgen.train.head_training import HeadTraining
from specgen.train.text_generation import NOT_HELD_OUT, Purpose, TextGeneration
from specgen.train.training_loop import TrainingBatches
from specgen.train.training_task import TrainingObserver, TrainingTask

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_OBJECTIVES = {"medusa": "MedusaObjective", "eagle": "EagleObjective", "glide": "GlideObjective"}


def objective_of(kind: str) -> type[Objective]:
    """Returns the objective that trains this kind of head."""
    found: type[Objective] = getattr(import_module(f"specgen.train.{kind}_objective"), _OBJECTIVES[kind])
    return found


def train_head(
    target: LoadedModel, objective_type: type[Objective], task: TrainingTask, observer: TrainingObserver
) -> HeadDescription:
    """Trains a head for `target`, and saves it in the folder `task.out`.

    Returns the head's description, with measurements of the saved weights on held-out text. Raises TrainingStopped if `observer`
    requests a stop (the same call resumes the training), and SpecgenError for an unsuitable target or folder.
    """
    check_head_folder(task.out)
    objective_type.check(target)
    kind = objective_type.kind
    settings = {**task.settings(target), "kind": kind}
    generation = TextGeneration(target, task, settings, observer, Purpose.HEAD)
    texts = generation.run()
    frozen = FrozenTarget(target)
    objective = objective_type(frozen, texts, task.recipe.seed)
    taught = [(text.ids.tolist(), text.top1.tolist()) for text in texts if text.part == Part.TRAIN]
    recipe = task.recipe.after_generation(generation.seconds)
    training = HeadTraining(objective, frozen, TrainingBatches(task.corpus, taught, recipe, NOT_HELD_OUT))
    progress = training.run(task.folder / "state.safetensors", settings, observer, task.clock)
    round_as_saved(objective.module)
    observer.announce("measuring on held-out text")
    measured = held_out(objective, frozen, [text for text in texts if text.part == Part.HELD_OUT])
    figures = {**progress.figures(generation.seconds), "held_out_agreement": measured.agreement}
    description = describe_head(kind, target, figures, task.made_with())
    save_head(task.out, objective.weights(measured.ranks), description)
    shutil.rmtree(task.folder, ignore_errors=True)
    return description
