"""The command `specgen tune --train`: its steps, and what is printed. Imports no torch before the
options are checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen.base.files import bundled_prompts, make_writable_folder
from specgen.base.part_verdict import Learning, PartVerdict
from specgen.base.text import print_json, print_result
from specgen.cli.opening import disable_hub_progress
from specgen.cli.options import ModelGroup, TrainingOptions, TuneOptions
from specgen.cli.trainable import (
    DRAFT,
    EXIT,
    PREDICTOR,
    Asked,
    Trainable,
    check,
    part_of,
)
from specgen.compare.prompts import load_prompts
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console


_NOTHING_HELD_OUT = (
    " Nothing was held out to measure it: there are fewer than ten different documents or prompts."
)


def train(
    models: ModelGroup,
    tuning: TuneOptions,
    seed: int,
    training: TrainingOptions,
    err: Console,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Loads the models, trains, and prints the result. Raises SpecgenError for wrong options and
    for what cannot be trained, RunError for failures while running, and KeyboardInterrupt if the
    user interrupted the training."""
    part = part_of(tuning, models)
    asked = Asked(models, tuning, training, seed, part)
    check(asked)
    prompts = [] if tuning.prompts is None else load_prompts(tuning.prompts, for_tuning=True)
    if asked.has_no_text:
        prompts = load_prompts(bundled_prompts(), for_tuning=None)
    if tuning.out is not None:
        make_writable_folder(tuning.out)
    disable_hub_progress(err, quiet=quiet)

    from specgen.cli.training import agreement_before, judge, load_objective, run

    with Progress(err, quiet=quiet) as progress:
        objective = load_objective(asked, prompts, progress)
        before = None if part is DRAFT else agreement_before(asked, objective.target)
        path, description = run(objective, progress)
        verdict = judge(asked, objective, path, progress)
    if part is DRAFT:
        fields, sentence = _draft_report(path, description["figures"], verdict)
    else:
        fields, sentence = _report(part, path, description, before, is_used=tuning.out is None)
        sentence += _judged(verdict, description["figures"])
    fields["verdict"] = None if verdict is None else verdict.as_dict()
    if as_json:
        print_json({"type": "train", **fields})
    else:
        print_result(str(path))
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)


def _report(
    part: Trainable,
    path: Path,
    description: Mapping[str, Any],
    before: tuple[float, Path] | None,
    *,
    is_used: bool,
) -> tuple[dict[str, Any], str]:
    """Returns the fields for JSON output, and sentences for the user, about a saved exit layer or
    head.

    `before` is what `agreement_before` returned. `is_used`: it was saved where it is found without
    being named.
    """
    figures = description["figures"]
    agreement = figures["held_out_agreement"]["greedy"]
    fields = {"target": description["target"], "agreement": agreement, "figures": figures}
    sentence = f"Trained {part.name} for {description['target']}."
    shares = agreement if isinstance(agreement, list) else [agreement]
    if agreement is None or not shares:
        sentence += _NOTHING_HELD_OUT
    else:
        sentence += (
            " Greedy agreement on held-out text, token by token of a draft: "
            f"{', '.join(f'{share:.0%}' for share in shares)}."
        )
        if before is not None and shares[0] < before[0]:
            sentence += _worse(before, path, is_used=is_used)
    if is_used:
        sentence += " Profiles of this target are stale now: run specgen tune again."
    if part not in (EXIT, PREDICTOR):
        return {"head": str(path), "kind": description["kind"], **fields}, sentence

    fit = figures.get("predictor")
    if fit is not None:
        sentence += (
            f" Predictor: mean score {fit['mean_score']:.2f} where "
            f"{fit['accepted']:.2f} is accepted, cross-entropy "
            f"{fit['loss']:.3f} (of the mean alone: {fit['base_loss']:.3f})."
        )
    elif not description["predictor"]:
        sentence += " No predictor: too little text."
    exit_fields = {
        "exit_layer": str(path),
        "after": description["after"],
        "predictor": description["predictor"],
        "profile": str(path.parent),
    }
    return {**exit_fields, **fields}, sentence


def _worse(before: tuple[float, Path], path: Path, *, is_used: bool) -> str:
    """Returns a sentence: that the part at `path` is worse than the one before, and how to return
    to that."""
    agreement, place = before
    folder = path if path.is_dir() else path.parent
    if not is_used:
        back = f"that one is still used, and this one only where it is named: {folder}"
    elif place in (path, folder):
        back = f"it was replaced in {folder}"
    else:
        back = f"to return to it, delete {folder}"
    return f" Worse than the one used until now, {agreement:.0%} on its own held-out text: {back}."


def _judged(verdict: PartVerdict | None, figures: Mapping[str, Any]) -> str:
    """Returns a sentence: how fast it was on held-out prompts, whether it is used, and if not, what
    would help. `figures` are those of the training; empty without a verdict."""
    if verdict is None:
        return ""
    learning = figures.get("learning")
    help_ = "" if verdict.pays or learning is None else f"; {Learning(**learning)}"
    return f" On held-out prompts: {verdict}{help_}."


def _draft_report(
    path: Path, figures: Mapping[str, Any], verdict: PartVerdict | None
) -> tuple[dict[str, Any], str]:
    """Returns the fields for JSON output, and sentences for the user, about a distilled draft
    model. They recommend it only if it was faster than all else on held-out prompts."""
    before = figures["agreement_before"]
    shares = [
        f"{share:.1%} of the {kind} tokens (before: {before[kind]:.1%})"
        for kind, share in figures["agreement"].items()
        if share is not None
    ]
    agreement = _NOTHING_HELD_OUT
    if shares:
        agreement = f" Greedy agreement on held-out text: {', '.join(shares)}."
    if verdict is None:
        advice = f" Whether it pays was not measured: specgen tune --draft {path}"
    elif verdict.pays:
        advice = f"{_judged(verdict, figures)} Use it: --draft {path}"
    else:
        advice = f"{_judged(verdict, figures)} It is kept in {path}"
    return {"draft": str(path), "figures": figures}, f"Distilled a draft model.{agreement}{advice}"
