"""From a target to a trained exit on disk: the target writes text, is cut down to its first layers, the exit is trained.

What is not finished lies in `training/` in the output folder, and goes once the exit is saved.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specgen.engine.decoder_layers import check_exit_depth, check_llama_structure, default_exit_depth
from specgen.engine.exit_files import Description, save_exit
from specgen.engine.exit_layer import ExitLayer
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.first_layers import FirstLayers
from specgen.traces.trace_writer import versions
from specgen.training.corpus import Texts
from specgen.training.predictor_training import Fit, train_predictor
from specgen.training.text_generation import TextGeneration, TrainingObserver, TrainingTask
from specgen.training.training_loop import Data, ExitTraining, Progress, Recipe, exit_rows, greedy_agreement

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_ENDING = 0.05  # of a budget in minutes: for the predictor and what else is left


@dataclass(frozen=True, slots=True)
class ExitTrainingTask(TrainingTask):
    """What exit to train. `after` is N, None for the usual depth."""

    after: int | None = None
    layers: int = 1
    own_head: bool = True


@dataclass(frozen=True, slots=True)
class ExitTrainingResult:
    """`agreement` with the target on its own greedy text that was kept apart, and `fit` of the predictor, None without one."""

    path: Path
    description: Description
    progress: Progress
    agreement: float | None
    fit: Fit | None
    parameters_held: int


def train_exit(target: LoadedModel, job: ExitTrainingTask, watcher: TrainingObserver) -> ExitTrainingResult:
    """Train and save. The target is taken apart on the way, and can't be used afterwards.

    Raises Stopped where the watcher stops it (the same call goes on later), SpecgenError for what does not fit.
    """
    after = depth_for(target, job.after)
    folder = job.out / "training"
    settings = _settings(target, job, after)
    writing = TextGeneration(target, job, settings, folder, watcher)
    writing.run()
    texts, writing_seconds = writing.kept.read(), writing.seconds
    layer = ExitLayer.of(target.model, job.layers)
    first = FirstLayers(target.model, after)
    recipe = what_is_left(job.recipe, writing_seconds)
    training = ExitTraining(first, layer, Data(job.open_text, texts, recipe), recipe, own_head=job.own_head)
    state = folder / "state.safetensors"
    if state.exists():
        training.restore(state, settings)
        watcher.announce(f"going on from step {training.step}")
    training.run(state, settings, watcher.training, watcher.stopping)
    layer.requires_grad_(False).eval()
    watcher.announce("training the predictor")
    apart = [text for text in texts if text.held_out]
    agreements = greedy_agreement(lambda ids: exit_rows(first, layer, ids)[0], apart)
    fitted = train_predictor(first, layer, texts, job.recipe.seed)
    predictor, fit = fitted if fitted is not None else (None, None)
    progress = training.progress()
    description = Description(
        target=target.name,
        fingerprint=settings["fingerprint"],
        after=after,
        layers=job.layers,
        own_head=job.own_head,
        predictor=predictor is not None,
        figures=_figures(progress, agreements, fit, writing_seconds),
        made_with={**({"command": job.note} if job.note else {}), **asdict(job.recipe), **versions()},
    )
    path = save_exit(job.out, layer, predictor, description)
    shutil.rmtree(folder, ignore_errors=True)
    return ExitTrainingResult(path, description, progress, agreements["greedy"], fit, training.parameters_held)


def depth_for(target: LoadedModel, after: int | None) -> int:
    """N: the one that was asked for, else the usual one. Raises SpecgenError where it or the model cannot be had."""
    check_llama_structure(target.model)
    after = default_exit_depth(target.model) if after is None else after
    check_exit_depth(target.model, after)
    return after


def what_is_left(recipe: Recipe, writing_seconds: float) -> Recipe:
    """The budget of the training itself."""
    if recipe.seconds is None:
        return recipe
    return replace(recipe, seconds=max(1.0, recipe.seconds * (1 - _ENDING) - writing_seconds))


def _settings(target: LoadedModel, job: ExitTrainingTask, after: int) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    return {
        **asdict(job.recipe),
        "fingerprint": weights_fingerprint(target.folder),
        "dtype": target.dtype_name,
        "after": after,
        "layers": job.layers,
        "own_head": job.own_head,
        **texts_of(job),
    }


def texts_of(job: TrainingTask) -> dict[str, str | None]:
    """What tells a task's texts from others."""
    return {
        "corpus": None if job.open_text is None else job.open_text.digest(),
        "prompts": None if not job.prompts else Texts(job.prompts).digest(),
    }


def _figures(progress: Progress, agreements: dict[str, float | None], fit: Fit | None, writing_seconds: float) -> dict[str, Any]:
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "loss": progress.loss,
        "minutes": {"writing": writing_seconds / 60, "training": progress.seconds / 60},
        "agreement_on_own_text": agreements,
        **({} if fit is None else {"predictor": asdict(fit)}),
    }


def default_recipe(device: torch.device, context_limit: int) -> Recipe:
    """The paper's batch where there is an accelerator. On a processor such a step would take minutes: many small ones do more."""
    if device.type == "cuda":
        return Recipe(window=min(2048, context_limit))
    return Recipe(batch=16, window=min(256, context_limit))
