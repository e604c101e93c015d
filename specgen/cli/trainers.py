"""What `specgen tune --train` calls for each part that can be trained, and what it reports about the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specgen.cli.train_inputs import LoadedModels
from specgen.cli.train_request import DRAFT, EXIT, PARTS, PREDICTOR, TrainedPart, TrainRequest

if TYPE_CHECKING:
    from specgen.engine.parts.exit_files import Description
    from specgen.train.training_task import TrainingObserver, TrainingTask

_NOTHING_HELD_OUT = " Nothing was held out to measure it: there are fewer than eight different documents or prompts."


class Trained(NamedTuple):
    """A trained part: the path of what was saved, the fields for JSON output, and a sentence for the user."""

    path: Path
    fields: dict[str, Any]
    sentence: str


class Trainer(NamedTuple):
    """How a part is trained. `check` raises SpecgenError if it cannot be, before any text is read."""

    check: Callable[[LoadedModels, TrainRequest], object]
    train: Callable[[LoadedModels, TrainRequest, TrainingTask, TrainingObserver], Trained]


def _check_exit(loaded: LoadedModels, request: TrainRequest) -> None:
    from specgen.train.exit_training import exit_depth

    exit_depth(loaded.target, request.layer)


def _train_exit(loaded: LoadedModels, request: TrainRequest, task: TrainingTask, observer: TrainingObserver) -> Trained:
    from specgen.train.exit_training import train_exit

    own_head = request.exit_head == "own"
    path, description = train_exit(
        loaded.target, task, observer, after=request.layer, layers=request.exit_layers, own_head=own_head
    )
    return _exit(path, description, f"an exit after layer {description.after}")


def _check_predictor(loaded: LoadedModels, request: TrainRequest) -> None:
    from specgen.engine.parts.exit_files import load_exit

    assert request.exit_layer is not None
    load_exit(request.exit_layer, loaded.target)


def _train_predictor(loaded: LoadedModels, request: TrainRequest, task: TrainingTask, observer: TrainingObserver) -> Trained:
    from specgen.train.exit_training import retrain_predictor

    assert request.exit_layer is not None
    path, description = retrain_predictor(loaded.target, request.exit_layer, task, observer)
    return _exit(path, description, "a predictor for the exit")


def _exit(path: Path, description: Description, what: str) -> Trained:
    """Describes a saved exit layer, of which `what` was trained."""
    share, fit = description.figures["held_out_agreement"]["greedy"], description.figures.get("predictor")
    fields = {
        "exit_layer": str(path),
        "target": description.target,
        "after": description.after,
        "agreement": share,
        "predictor": description.predictor,
        "figures": description.figures,
        "profile": str(path.parent),
    }
    agreement = _NOTHING_HELD_OUT if share is None else f" Greedy agreement on held-out text: {share:.0%}."
    predictor = "" if description.predictor else " No predictor: too little text."
    if fit is not None:
        predictor = f" Predictor: mean score {fit['mean_score']:.2f} where {fit['accepted']:.2f} is accepted"
        predictor += f", area under the ROC curve {fit['ranking']:.2f}."
    return Trained(path, fields, f"Trained {what} of {description.target}.{agreement}{predictor}")


def _train_draft(loaded: LoadedModels, _: TrainRequest, task: TrainingTask, observer: TrainingObserver) -> Trained:
    """Distils the draft. It is recommended only if it predicts more of the target's greedy tokens than before."""
    from specgen.train.distillation import distill

    assert loaded.draft is not None
    figures = distill(loaded.target, loaded.draft, task, observer, loaded.draft_dtype)
    before, after = figures["agreement_before"], figures["agreement"]
    shares = [f"{after[kind]:.1%} of the {kind} tokens (before: {before[kind]:.1%})" for kind in after if after[kind] is not None]
    agreement = f" Greedy agreement on held-out text: {', '.join(shares)}." if shares else _NOTHING_HELD_OUT
    if figures.get("acceptance") is not None:
        acceptance = f"{figures['acceptance']:.1%} (before: {figures['acceptance_before']:.1%})"
        agreement += f" Expected acceptance at temperature 1: {acceptance}; the vocabularies allow {figures['common']:.1%}."
    advice = f"Use it: --draft {task.out}"
    if shares and (after["greedy"] or 0) <= (before["greedy"] or 0):
        advice = f"Agreement on greedy tokens did not rise: keep the draft you have. The new one is in {task.out}"
    fields = {"draft": str(task.out), "figures": figures}
    return Trained(task.out, fields, f"Distilled a draft model.{agreement} {advice}")


def _check_head(loaded: LoadedModels, request: TrainRequest) -> None:
    from specgen.engine.parts.head_files import check_head_folder
    from specgen.train.heads import objective_of

    objective_of(request.part.method).check(loaded.target)
    if request.out is not None:
        check_head_folder(request.out)


def _train_head(loaded: LoadedModels, request: TrainRequest, task: TrainingTask, observer: TrainingObserver) -> Trained:
    from specgen.train.heads import objective_of, train_head

    part = request.part
    description = train_head(loaded.target, objective_of(part.method), task, observer)
    shares = description.figures["held_out_agreement"]
    fields = {
        "head": str(task.out),
        "kind": part.method,
        "target": description.target,
        "agreement": shares["greedy"],
        "figures": description.figures,
    }
    by_depth = ", ".join(f"{share:.0%}" for share in shares["greedy"] or [])
    agreement = f" Greedy agreement on held-out text, token by token of a draft: {by_depth}." if by_depth else _NOTHING_HELD_OUT
    return Trained(task.out, fields, f"Trained {part.name} for {description.target}.{agreement}")


TRAINERS: Mapping[TrainedPart, Trainer] = {
    EXIT: Trainer(_check_exit, _train_exit),
    PREDICTOR: Trainer(_check_predictor, _train_predictor),
    DRAFT: Trainer(lambda *_: None, _train_draft),
    **{part: Trainer(_check_head, _train_head) for part in PARTS.values() if part.is_head},
}
