"""The command `specgen tune --train`: what can be trained, with which options, from which models
and text, and what is printed.

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import make_writable_folder, pair_folder, part_folder
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.base.text import print_json, print_result
from specgen.cli.opening import disable_hub_progress
from specgen.cli.options import ModelGroup, TrainingOptions, TuneOptions
from specgen.compare.prompts import Prompt, load_prompts
from specgen.pair.prompts import messages
from specgen.view.progress import Progress, TrainingLine

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.engine.draft_model import DraftModel
    from specgen.engine.loaded_model import LoadedModel
    from specgen.train.corpus import Corpus
    from specgen.train.loop import Objective
    from specgen.train.task import TrainingTask

DEFAULT_MINUTES = 10.0
_DEMO_CORPUS = Path("demo")  # a file of that name is given as ./demo
_DEMO_TOKENS = 600_000
_NOTHING_HELD_OUT = (
    " Nothing was held out to measure it: there are fewer than eight "
    "different documents or prompts."
)
_EXIT_OPTIONS = {"layer": "--layer", "exit_layers": "--exit-layers", "exit_head": "--exit-head"}
_LOOP_OPTIONS = {
    "steps": "--steps",
    "self_text": "--self-text",
    "batch": "--batch-size",
    "learning_rate": "--learning-rate",
}
_OPTIONS = _EXIT_OPTIONS | _LOOP_OPTIONS


@dataclass(frozen=True, slots=True)
class Trainable:
    """What can be trained. `name` is its kind with an article, `method` the value of --methods that
    trains it, `objective` its module and class in `specgen.train`. `learning_rate` and `self_text`
    are the defaults of these options.
    """

    name: str
    method: str
    objective: str
    learning_rate: float = 1e-3
    self_text: float = 0.5


EXIT = Trainable("an exit layer", "eesd", "exits.ExitObjective")
# of the exit layer that --exit-layer names
PREDICTOR = Trainable("a predictor", "eesd", "exits.PredictorObjective")
# by default it learns from the target's own text only
DRAFT = Trainable("a draft model", "sd", "distillation.DraftObjective", 3e-4, 1.0)
MEDUSA = Trainable("Medusa heads", "medusa", "blocks.MedusaObjective", 3e-3)
EAGLE = Trainable("an EAGLE head", "eagle", "heads.EagleObjective")
GLIDE = Trainable("a GliDe head", "glide", "heads.GlideObjective")
BLOCK = Trainable("a DSpark head", "block", "blocks.BlockObjective", 1e-2)
TRAINABLE = {part.method: part for part in (EXIT, DRAFT, MEDUSA, EAGLE, GLIDE, BLOCK)}


class Asked(NamedTuple):
    """What the user asked for: the options, and in `part` what is to be trained."""

    models: ModelGroup
    tuning: TuneOptions
    training: TrainingOptions
    seed: int
    part: Trainable


def part_of(tuning: TuneOptions, models: ModelGroup) -> Trainable:
    """Returns what the options ask to train. Raises SpecgenError if --methods names a method that
    has nothing to train, or methods for which different things would be trained."""
    named = {name.strip() for name in (tuning.methods or "eesd").split(",")}
    names = {"eesd" if name.startswith("eesd") else name for name in named}
    for name in sorted(names - TRAINABLE.keys()):
        methods.find(name)  # an unknown name gets its own message
        trainable = ", ".join(f"{part.name} ({part.method})" for part in TRAINABLE.values())
        raise SpecgenError(
            f"{name} has nothing to train", f"Name with --methods what to train: {trainable}"
        )
    if len(names) > 1:
        raise SpecgenError(
            f"{' and '.join(sorted(names))} cannot be trained in one run", "Give one of them"
        )
    if names == {"eesd"} and models.exit_layer is not None:
        return PREDICTOR
    return TRAINABLE[names.pop()]


def check(asked: Asked) -> None:
    """Raises SpecgenError for options that are wrong for any model, and for those that do not apply
    to what is trained."""
    models, tuning, training, _, part = asked
    _check_that_all_apply(asked)
    _check_values(asked)
    if training.minutes is not None and training.steps is not None:
        raise SpecgenError("both --minutes and --steps are given", "Give one of them")
    if tuning.chat and training.self_text is not None:
        raise SpecgenError(
            "--self-text cannot be combined with --chat: the target then generates all text",
            "Leave it out",
        )
    has_both = tuning.prompts is not None and training.corpus is not None
    if part is DRAFT and not tuning.chat and has_both and training.self_text in (None, 1):
        raise SpecgenError(
            f"--corpus {training.corpus} would not be used: with --prompts a draft learns "
            "from the target's continuations only",
            "Leave it out, or mix it in: --self-text 0.5",
        )
    if part is DRAFT and (models.finds or not models.has_draft):
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")


def _check_that_all_apply(asked: Asked) -> None:
    """Raises SpecgenError if an option is given that does not apply to what is trained."""
    training = asked.training
    part = asked.part
    unused = [] if part is EXIT else [*_EXIT_OPTIONS]
    if part is PREDICTOR:
        unused += _LOOP_OPTIONS
    wrong = []
    for name in unused:
        if getattr(training, name) != getattr(TrainingOptions, name):
            wrong.append(_OPTIONS[name])
    if asked.models.exit_layer is not None and part is not PREDICTOR:
        wrong.append("--exit-layer")
    if wrong:
        with_option = "--exit-layer" if part is PREDICTOR else f"--methods {part.method}"
        problem = (
            f"{', '.join(wrong)} cannot be combined with --train {with_option}, "
            f"which trains {part.name}"
        )
        raise SpecgenError(problem, "Leave out what does not apply")


def _check_values(asked: Asked) -> None:
    """Raises SpecgenError for a value that is out of range."""
    training = asked.training
    tiny = sys.float_info.min
    huge = sys.float_info.max
    least_share = tiny if asked.part is DRAFT else 0
    rules = (
        ("--minutes", training.minutes, tiny, huge, "above 0"),
        ("--steps", training.steps, 1, huge, "above 0"),
        ("--batch-size", training.batch, 1, huge, "above 0"),
        ("--learning-rate", training.learning_rate, tiny, huge, "above 0"),
        ("--window", training.training_length, 8, huge, "at least 8 tokens"),
        ("--self-text", training.self_text, least_share, 1, "from 0 to 1, for sd above 0"),
        ("--seed", asked.seed, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1"),
    )
    for option, value, least, most, rule in rules:
        if value is not None and not least <= value <= most:
            raise SpecgenError(f"{option} is {value}", f"It has to be {rule}")
    if training.exit_head not in ("own", "target"):
        hint = "Take own (a trained copy) or target (the target's head, unchanged)"
        raise SpecgenError(f"--exit-head is {training.exit_head!r}", hint)


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
    """Loads the models, trains, and prints the result. Raises KeyboardInterrupt if the user
    interrupted the training."""
    part = part_of(tuning, models)
    asked = Asked(models, tuning, training, seed, part)
    check(asked)
    prompts = [] if tuning.prompts is None else load_prompts(tuning.prompts, for_tuning=True)
    if tuning.out is not None:
        make_writable_folder(tuning.out)
    disable_hub_progress(err, quiet=quiet)
    with Progress(err, quiet=quiet) as progress:
        objective = load_objective(asked, prompts, progress)
        before = None if part is DRAFT else _agreement_before(asked, objective.target)
        path, description = _run(objective, progress)
    if part is DRAFT:
        fields, sentence = _draft_report(path, description["figures"])
    else:
        fields, sentence = _report(part, path, description, before, is_used=tuning.out is None)
    if as_json:
        print_json({"type": "train", **fields})
    else:
        print_result(str(path))
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)


def _run(objective: Objective, progress: Progress) -> tuple[Path, Mapping[str, Any]]:
    """Trains, and returns where the result was saved, and its description. Raises
    KeyboardInterrupt if the user interrupted the training, and RunError if it cannot be saved."""
    from specgen.train.loop import train as run
    from specgen.train.task import TrainingStopped

    task = objective.task
    target = objective.target
    line = TrainingLine(progress)
    make_writable_folder(task.folder)
    task.announce = line.announce
    task.show = line.show
    task.announce(f"{target.name} on {target.device}, {target.dtype_name}; output: {task.out}")
    with interrupts.held(raises=False) as task.stop_requested:
        try:
            return run(objective)
        except TrainingStopped:
            task.announce(
                f"interrupted; the same command resumes from here (state in {task.folder})"
            )
            raise ReportedInterrupt from None
        except OSError as error:
            raise RunError(
                f"cannot write to {task.out}: {error.strerror or error}",
                "What was saved before is still there: free some space and run the "
                "same command again",
            ) from error


def load_objective(asked: Asked, prompts: Sequence[Prompt], progress: Progress) -> Objective:
    """Loads the models and the text, and returns what is to be trained. `prompts` are those of
    --prompts. Raises SpecgenError if it cannot be trained for these models, or without text."""
    from specgen.pair.loading import load_pair

    training = asked.training
    part = asked.part
    options = replace(asked.models.loaded(), exit_layer=None, head=None)
    if part is not DRAFT:
        options = replace(options, draft=None, draft_revision=None, draft_device=None)
    pair = load_pair(options, progress.announce)
    progress.announce("reading texts")
    task = training_task(asked, prompts, pair.target, pair.draft if part is DRAFT else None)
    module, name = part.objective.split(".")
    make: Callable[..., Objective] = getattr(import_module(f"specgen.train.{module}"), name)
    if part is EXIT:
        return make(
            task,
            pair.target,
            training.layer,
            training.exit_layers,
            own_head=training.exit_head == "own",
        )
    if part is PREDICTOR:
        return make(task, pair.target, asked.models.exit_layer)
    return make(task, pair.target, pair.draft) if part is DRAFT else make(task, pair.target)


def training_task(
    asked: Asked, prompts: Sequence[Prompt], target: LoadedModel, draft: DraftModel | None
) -> TrainingTask:
    """Reads the training text and returns the training task, with default values for options that
    are not given. `draft` is the draft model to train, None if something else is trained. Raises
    SpecgenError if there is no text, or if a file cannot be read.
    """
    from specgen.engine.weights import weights_fingerprint
    from specgen.train.corpus import Corpus
    from specgen.train.task import Recipe, TrainingTask

    training = asked.training
    part = asked.part
    # without a GPU a step with the paper's batch size would take minutes
    on_cuda = target.device.type == "cuda"
    limit = min(model.context_limit for model in (target, draft or target))
    window = min(training.training_length or (2048 if on_cuda else 256), limit)
    if asked.tuning.chat:
        corpus = None
        ids = _conversations(training.corpus, prompts, target, 3 * window // 4)
    else:
        corpus = _corpus(asked, target)
        ids = [target.tokenizer.encode(prompt.text) for prompt in prompts]

    share = part.self_text if training.self_text is None else training.self_text
    seconds = 60 * (training.minutes or DEFAULT_MINUTES)
    # a predictor needs no time limit, but the user may set one
    is_timed = training.minutes is not None or part is not PREDICTOR
    recipe = Recipe(
        steps=training.steps,
        seconds=seconds if is_timed and training.steps is None else None,
        learning_rate=training.learning_rate or part.learning_rate,
        batch=training.batch or (64 if on_cuda else 16),
        window=window,
        self_text=1.0 if corpus is None else share,
        seed=asked.seed,
    )

    fingerprint = weights_fingerprint(target.folder)
    exit_layer = asked.models.exit_layer
    if draft is not None:
        out = pair_folder(target.name, fingerprint, draft.name) / "distilled"
    elif exit_layer is not None:
        out = exit_layer if exit_layer.is_dir() else exit_layer.parent
    else:
        out = part_folder("exit" if part is EXIT else part.method, target.name, fingerprint)
    return TrainingTask(asked.tuning.out or out, recipe, corpus, Corpus(ids) if ids else None)


def _conversations(
    corpus: Path | None, prompts: Sequence[Prompt], target: LoadedModel, limit: int
) -> list[list[int]]:
    """Returns the token ids of the prompts of --prompts, and of those in the corpus file, in the
    model's chat template.

    Prompts of more than `limit` tokens are left out, because a template cannot be cut. Raises
    SpecgenError if none is left.
    """
    from specgen.train.corpus import chat_prompts

    conversations = [target.tokenizer.conversation(messages(prompt.text)) for prompt in prompts]
    if corpus is not None:
        conversations += chat_prompts(corpus, target.tokenizer, limit)
    kept = [ids for ids in conversations if len(ids) <= limit]
    if not kept:
        hint = (
            "Give --corpus FILE (prompts or messages) or --prompts FILE, shorter ones "
            "or a larger --window"
        )
        raise SpecgenError(f"there are no prompts for --chat of at most {limit} tokens", hint)
    return kept


def _corpus(asked: Asked, target: LoadedModel) -> Corpus | None:
    """Reads the corpus; None if only prompts are given. Raises SpecgenError if there is no text."""
    from specgen.train.corpus import demo_corpus, read_corpus

    named = asked.training.corpus
    if named == _DEMO_CORPUS or (named is None and asked.models.target is None):
        return demo_corpus(target.tokenizer.encode, asked.seed, _DEMO_TOKENS)
    if named is not None:
        return read_corpus(named, target.tokenizer.encode)
    if asked.tuning.prompts is None or asked.training.self_text == 0:
        hint = (
            "Give --corpus FILE (plain text or JSON lines), or --prompts FILE and "
            "leave --self-text above 0"
        )
        raise SpecgenError("there is no text to train on", hint)
    return None


def _agreement_before(asked: Asked, target: LoadedModel) -> tuple[float, Path] | None:
    """Returns the greedy agreement that was measured for the part used until now, and its path;
    None if it is not known."""
    from specgen.models.parts import PartStore

    kind = "exit" if asked.part.method == "eesd" else asked.part.method
    part = PartStore(target, is_bundled=asked.models.target is None).find(kind)
    if part is None or part.description is None:
        return None
    greedy = part.description.figures.get("held_out_agreement", {}).get("greedy")
    if greedy is None or greedy == []:
        return None
    return _first(greedy), part.path


def _first(agreement: float | Sequence[float]) -> float:
    return agreement if isinstance(agreement, float) else agreement[0]


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

    `before` is what `_agreement_before` returned. `is_used`: it was saved where it is found without
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


def _draft_report(path: Path, figures: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the fields for JSON output, and sentences for the user, about a distilled draft
    model. They recommend it only if it predicts more of the target's greedy tokens than before."""
    before = figures["agreement_before"]
    after = figures["agreement"]
    shares = [
        f"{share:.1%} of the {kind} tokens (before: {before[kind]:.1%})"
        for kind, share in after.items()
        if share is not None
    ]
    agreement = _NOTHING_HELD_OUT
    if shares:
        agreement = f" Greedy agreement on held-out text: {', '.join(shares)}."
    advice = f"Use it: --draft {path}"
    if shares and (after["greedy"] or 0) <= (before["greedy"] or 0):
        advice = (
            "Agreement on greedy tokens did not rise: keep the draft you have. The "
            f"new one is in {path}"
        )
    return {"draft": str(path), "figures": figures}, f"Distilled a draft model.{agreement} {advice}"
