"""Loads the models and the text for `specgen tune --train`, and trains. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import (
    DRAFT_DESCRIPTION,
    HEAD_DESCRIPTION,
    make_writable_folder,
    pair_folder,
    part_folder,
)
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.base.part_verdict import PartVerdict
from specgen.cli.trainable import (
    DEFAULT_MINUTES,
    DRAFT,
    EXIT,
    PREDICTOR,
    Asked,
    Trainable,
    first_share,
)
from specgen.compare.prompts import ListedPrompt
from specgen.engine.parts.trained_part import EXIT_DESCRIPTION
from specgen.engine.weights import weights_fingerprint
from specgen.methods.base import DRAFT_MODEL
from specgen.models.parts import PartStore
from specgen.pair.finding import Found
from specgen.pair.loading import load_pair, with_found
from specgen.pair.prompts import messages
from specgen.train import loop
from specgen.train.corpus import Corpus, Use, chat_prompts, demo_corpus, read_corpus
from specgen.train.loop import Objective
from specgen.train.speed import measured_speed
from specgen.train.task import Recipe, TrainingStopped, TrainingTask
from specgen.tune.outcome import Deadline
from specgen.tune.part_trial import NEW_TOKENS, contenders, trial_seconds, verdict
from specgen.view.progress import Progress, TrainingLine

if TYPE_CHECKING:
    from specgen.engine.draft_model import DraftModel
    from specgen.engine.loaded_model import LoadedModel

_DEMO_CORPUS = Path("demo")  # a file of that name is given as ./demo
_DEMO_TOKENS = 600_000
_VERDICT_SHARE = 0.08  # of a budget in minutes, for measuring what was trained
_VERDICT_SECONDS = 20.0  # the most; also with a budget in steps
_BEGINNING = 32  # tokens of a held-out document, as a prompt


def run(objective: Objective, progress: Progress) -> tuple[Path, Mapping[str, Any]]:
    """Trains, and returns where the result was saved, and its description. Raises
    KeyboardInterrupt if the user interrupted the training, RunError if it cannot be saved, and
    otherwise as `loop.train`."""
    task = objective.task
    target = objective.target
    line = TrainingLine(progress)
    make_writable_folder(task.folder)
    task.announce = line.announce
    task.show = line.show
    task.announce(f"{target.name} on {target.device}, {target.dtype_name}; output: {task.out}")
    with interrupts.held(raises=False, terminations=True) as task.stop_requested:
        try:
            return loop.train(objective)
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


def load_objective(asked: Asked, prompts: Sequence[ListedPrompt], progress: Progress) -> Objective:
    """Loads the models and the text, and returns what is to be trained. `prompts` are those of
    --prompts. Raises SpecgenError if it cannot be trained for these models, or without text."""
    training = asked.training
    part = asked.part
    began = time.monotonic()
    options = replace(asked.models.loaded(), exit_layer=None, head=None)
    if part is not DRAFT:
        options = replace(options, draft=None, draft_revision=None, draft_device=None)
    pair = load_pair(options, progress.announce)
    loaded = time.monotonic()
    progress.announce("reading texts")
    task = training_task(asked, prompts, pair.target, pair.draft if part is DRAFT else None)
    task.began = began
    if task.recipe.seconds is not None:
        one = measured_speed(pair.target, [0]).one
        trial = (loaded - began) + trial_seconds(one)
        task.afterwards = max(verdict_seconds(task.recipe.seconds), trial)
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
    asked: Asked, prompts: Sequence[ListedPrompt], target: LoadedModel, draft: DraftModel | None
) -> TrainingTask:
    """Reads the training text and returns the training task, with default values for options that
    are not given. `draft` is the draft model to train, None if it is made of layers of the target
    or something else is trained. Raises
    SpecgenError if there is no text, or if a file cannot be read.
    """
    training = asked.training
    part = asked.part
    on_cuda = target.device.type == "cuda"
    limit = min(model.context_limit for model in (target, draft or target))
    window = min(training.training_length or (2048 if on_cuda else 256), limit)
    answers = asked.has_no_text and bool(target.tokenizer.template)
    if asked.tuning.chat or answers:
        corpus = None
        ids = _conversations(training.corpus, prompts, target, 3 * window // 4)
    else:
        corpus = None if asked.has_no_text else _corpus(asked, target)
        ids = [target.tokenizer.encode(prompt.text) for prompt in prompts]

    share = part.self_text if training.self_text is None else training.self_text
    seconds = 60 * (training.minutes or DEFAULT_MINUTES)
    # a predictor needs no time limit, but the user may set one
    is_timed = training.minutes is not None or part is not PREDICTOR
    # by timing on a CPU, where a step with the paper's batch size would take minutes
    batch = 64 if on_cuda else (None if training.steps is None else 16)
    recipe = Recipe(
        steps=training.steps,
        seconds=seconds if is_timed and training.steps is None else None,
        learning_rate=training.learning_rate or part.learning_rate,
        batch=training.batch or batch,
        window=window,
        self_text=1.0 if corpus is None else share,
        seed=asked.seed,
    )

    fingerprint = weights_fingerprint(target.folder)
    exit_layer = asked.models.exit_layer
    if part is DRAFT:
        name = None if draft is None else draft.name
        out = pair_folder(target.name, fingerprint, name) / "distilled"
    elif exit_layer is not None:
        out = exit_layer if exit_layer.is_dir() else exit_layer.parent
    else:
        out = part_folder("exit" if part is EXIT else part.method, target.name, fingerprint)
    prompts_ids = Corpus(ids) if ids else None
    kept_text = pair_folder(target.name, fingerprint, None) / "text"
    return TrainingTask(asked.tuning.out or out, recipe, corpus, prompts_ids, kept_text)


def _conversations(
    corpus: Path | None, prompts: Sequence[ListedPrompt], target: LoadedModel, limit: int
) -> list[list[int]]:
    """Returns the token ids of the prompts of --prompts, and of those in the corpus file, in the
    model's chat template.

    Prompts of more than `limit` tokens are left out, because a template cannot be cut. Raises
    SpecgenError if none is left.
    """
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
    """Reads the corpus; None if only prompts are given. Raises SpecgenError if there is no text in
    it."""
    named = asked.training.corpus
    if named == _DEMO_CORPUS or (named is None and asked.models.target is None):
        return demo_corpus(target.tokenizer.encode, asked.seed, _DEMO_TOKENS)
    if named is not None:
        return read_corpus(named, target.tokenizer.encode)
    return None


def verdict_seconds(budget: float | None) -> float:
    """Returns how many seconds of a budget (None: it is in steps) the verdict may take."""
    return _VERDICT_SECONDS if budget is None else min(_VERDICT_SECONDS, _VERDICT_SHARE * budget)


def judge(asked: Asked, objective: Objective, path: Path, progress: Progress) -> PartVerdict | None:
    """Measures what was trained and saved at `path` on prompts that were held out, and records the
    verdict in its description.

    None if no prompts were held out, or if it cannot run. Frees the weights of the objective's
    target. Raises RunError if the description cannot be written.
    """
    task = objective.task
    limit = objective.target.context_limit - NEW_TOKENS - 1
    prompts = [ids for ids in held_out_prompts(task) if len(ids) < limit]
    if not prompts:
        return None
    objective.target.model.free_weights()
    part = asked.part
    options = asked.models.loaded()
    if part in (EXIT, PREDICTOR):
        options = replace(options, exit_layer=path)
    elif part is not DRAFT:
        options = replace(options, head=path)
    try:
        pair = load_pair(options, progress.announce)
        before = None
        if part is DRAFT:
            before = pair
            trained = Found(DRAFT_MODEL, str(path), path, 0.0, 0.0, "trained now")
            pair = with_found(pair, trained, options)
        named = contenders(pair, part.method, before)
        seconds = verdict_seconds(task.recipe.seconds)
        if task.recipe.seconds is not None:
            seconds = min(max(seconds, task.afterwards), task.seconds_left + task.afterwards)
        deadline = Deadline.after(seconds)
        made = verdict(named, part.method, prompts, deadline, progress.announce)
    except SpecgenError:  # what was trained is there all the same
        return None
    if made is not None:
        made.record(_description_of(part, path))
    return made


def held_out_prompts(task: TrainingTask) -> list[list[int]]:
    """Returns the prompts (token ids) that were held out of training: the user's or the bundled
    ones, or the beginnings of documents. None if too few are there to hold some out."""
    source = task.prompts or task.corpus
    if source is None or not source.is_split:
        return []
    documents = source.different((Use.HELD_OUT,))
    if task.prompts is not None:
        return [list(ids) for ids in documents]
    return [list(ids[:_BEGINNING]) for ids in documents]


def _description_of(part: Trainable, path: Path) -> Path:
    """Returns the file that describes what was trained and saved at `path`."""
    if part in (EXIT, PREDICTOR):
        return path.parent / EXIT_DESCRIPTION
    return path / (DRAFT_DESCRIPTION if part is DRAFT else HEAD_DESCRIPTION)


def agreement_before(asked: Asked, target: LoadedModel) -> tuple[float, Path] | None:
    """Returns the greedy agreement that was measured for the part used until now, and its path;
    None if it is not known."""
    kind = "exit" if asked.part.method == "eesd" else asked.part.method
    part = PartStore(target, is_bundled=asked.models.target is None).find(kind)
    if part is None or part.description is None:
        return None
    greedy = part.description.figures.get("held_out_agreement", {}).get("greedy")
    if greedy is None or greedy == []:
        return None
    return first_share(greedy), part.path
