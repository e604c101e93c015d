"""`specgen tune --train` from its request to its report: trains EESD's exit layer, or distils a draft model."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from specgen import methods
from specgen.cli.error_reporting import INTERRUPTED
from specgen.errors import RunError, SpecgenError
from specgen.files import make_writable_folder
from specgen.json_lines import print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from specgen.cli.model_options import ModelOptions
    from specgen.engine.model_loading import LoadedModel, ModelSource
    from specgen.training.corpus import Corpus
    from specgen.training.exit_training import ExitTrainingTask
    from specgen.training.training_task import TrainingObserver
    from specgen.ui.terminal.loading_line import LoadingLine

DEFAULT_MINUTES = 10.0
_DEMO_CORPUS = Path("demo")  # a file of that name has to be given as ./demo or by its absolute path
_DEMO_TOKENS = 600_000
_LEARNING_RATES = {"eesd": 1e-3, "sd": 3e-4}
_GENERATED_SHARES = {"eesd": 0.5, "sd": 1.0}


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The options, checked as far as that is possible without a model. `kind` is the method to train for: eesd or sd."""

    kind: str
    minutes: float | None
    steps: int | None
    corpus: Path | None
    prompts: Path | None
    out: Path | None
    layer: int | None
    exit_layers: int
    own_head: bool
    self_text: float | None
    batch: int | None
    training_length: int | None
    learning_rate: float | None
    seed: int

    def __post_init__(self) -> None:
        if self.minutes is not None and self.steps is not None:
            raise SpecgenError("both --minutes and --steps are given", "Give one of them")
        positive = {
            "--minutes": self.minutes,
            "--steps": self.steps,
            "--layer": self.layer,
            "--batch-size": self.batch,
            "--learning-rate": self.learning_rate,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise SpecgenError(f"{name} is {value}", "It has to be above 0")
        if self.training_length is not None and self.training_length < 8:
            raise SpecgenError(f"--window is {self.training_length}", "It has to be at least 8 tokens")
        if not 0 <= self.exit_layers <= 2:
            raise SpecgenError(f"--exit-layers is {self.exit_layers}", "It has to be 0 (a head alone), 1 or 2")
        least = "above 0" if self.kind == "sd" else "from 0"
        if self.self_text is not None and not (0 <= self.self_text <= 1 and (self.self_text or self.kind != "sd")):
            raise SpecgenError(f"--self-text is {self.self_text}", f"It has to be {least} to 1")
        if not 0 <= self.seed < 2**31:
            raise SpecgenError(f"--seed is {self.seed}", "It has to be a whole number from 0 to 2^31 - 1")
        if self.kind == "sd" and self.prompts is not None and self.corpus is not None and self.self_text in (None, 1):
            raise SpecgenError(
                f"--corpus {self.corpus} would not be used: with --prompts a draft learns from the target's continuations only",
                "Leave it out, or mix it in: --self-text 0.5",
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise SpecgenError(f"--out is {self.out}, which is a file", "Name a folder")


def request(method_names: str | None, head: str, **options: Any) -> TrainRequest:
    """Make a request from the command's options. Raises SpecgenError for options that do not fit."""
    kind = _kind(method_names)
    if kind == "sd" and (options["layer"], options["exit_layers"], head) != (None, 1, "own"):
        raise SpecgenError("--layer, --exit-layers and --head belong to an exit layer, not to a draft model", "Leave them out")
    if head not in ("own", "target"):
        raise SpecgenError(f"--head is {head!r}", "Take own (a trained copy) or target (the target's head, unchanged)")
    if options["minutes"] is None and options["steps"] is None:
        options["minutes"] = DEFAULT_MINUTES
    return TrainRequest(kind, **options, own_head=head == "own")


def _kind(names: str | None) -> str:
    kinds = set()
    for name in (names or "eesd").split(","):
        if name.strip() != "sd" and not name.strip().startswith("eesd"):
            methods.find(name.strip())  # an unknown name gets its own message
            raise SpecgenError(f"{name.strip()} has nothing to train", "Train an exit (--methods eesd) or a draft (--methods sd)")
        kinds.add("sd" if name.strip() == "sd" else "eesd")
    if len(kinds) > 1:
        raise SpecgenError("eesd and sd cannot be trained in one run", "Give one of them")
    return kinds.pop()


def train(models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    """Load the models, train, and report; returns the exit code of an interrupted run, else None."""
    from rich.text import Text

    from specgen.training.training_task import TrainingStopped
    from specgen.ui.terminal.training_progress import TrainingBars

    loaded, task = _prepare(models, request, err, quiet=quiet)
    make_writable_folder(task.folder)
    with Stop() as stop, TrainingBars(err, stop, quiet=quiet) as bars:
        bars.announce(f"{loaded.target.name} on {loaded.target.device}, {loaded.target.dtype_name}; output: {task.out}")
        try:
            path, line, sentence = _train(loaded, task, bars)
        except TrainingStopped:
            bars.announce(f"interrupted; the same command resumes from here (state in {task.folder})")
            return INTERRUPTED
        except OSError as error:
            raise RunError(
                f"cannot write to {task.out}: {error.strerror or error}",
                "What was saved before is still there: free some space and run the same command again",
            ) from error
    if as_json:
        print_json({"type": "train", **line})
    else:
        print(path)
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)
    return None


@dataclass(frozen=True, slots=True)
class _Models:
    """The target, and for sd the draft to train (loaded in float32) with the dtype in which its weights are stored."""

    target: LoadedModel
    draft: LoadedModel | None = None
    draft_dtype: torch.dtype | None = None


def _train(models: _Models, task: ExitTrainingTask, observer: TrainingObserver) -> tuple[Path, dict[str, Any], str]:
    """Returns the output's path, its fields in the JSON line, and a sentence for the user."""
    if models.draft is not None and models.draft_dtype is not None:
        from specgen.training.distillation import distill

        draft = distill(models.target, models.draft, task, observer, models.draft_dtype)
        shares = [
            f"{share:.1%} of the {kind} tokens (before: {draft.before[kind]:.1%})"
            for kind, share in draft.after.items()
            if share is not None
        ]
        agreement = f" Greedy agreement on held-out text: {', '.join(shares)}." if shares else ""
        sentence = f"Distilled a draft model.{agreement} Use it: --draft {draft.path}"
        return draft.path, {"draft": str(draft.path), "figures": draft.figures}, sentence
    from specgen.training.exit_training import train_exit

    exit_ = train_exit(models.target, task, observer)
    description, share, fit = exit_.description, exit_.greedy_agreement, exit_.fit
    fields = {
        "exit_layer": str(exit_.path),
        "target": description.target,
        "after": description.after,
        "agreement": share,
        "predictor": description.predictor,
        "figures": description.figures,
        "profile": str(exit_.path.parent),
    }
    agreement = "" if share is None else f" Greedy agreement on held-out text: {share:.0%}."
    predictor = "No predictor: too little text." if fit is None else f"Predictor: area under the ROC curve {fit.ranking:.2f}."
    sentence = f"Trained an exit after layer {description.after} of {description.target}.{agreement} {predictor}"
    return exit_.path, fields, sentence


def _prepare(models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool) -> tuple[_Models, ExitTrainingTask]:
    """Load the models and the texts."""
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the hub is imported
    from specgen.compare.prompts import load_prompts
    from specgen.training.exit_training import ExitTrainingTask, exit_depth
    from specgen.training.training_task import Recipe
    from specgen.ui.terminal.loading_line import LoadingLine

    with LoadingLine(err, quiet=quiet) as loading:
        loaded = _load(models, request, loading)
        target, draft = loaded.target, loaded.draft
        if draft is None:
            exit_depth(target, request.layer)
        loading.announce("reading texts")
        corpus = _corpus(models, request, target)
        prompts = [] if request.prompts is None else load_prompts(request.prompts)
    limit = min(model.context_limit for model in (target, draft or target))
    recipe = Recipe.default(target.device, limit)
    share = _GENERATED_SHARES[request.kind] if request.self_text is None else request.self_text
    recipe = replace(
        recipe,
        steps=request.steps,
        seconds=None if request.minutes is None else 60 * request.minutes,
        learning_rate=request.learning_rate or _LEARNING_RATES[request.kind],
        batch_size=request.batch or recipe.batch_size,
        training_length=min(request.training_length or recipe.training_length, limit),
        generated_share=1.0 if corpus is None else share,
        seed=request.seed,
    )
    out = request.out or _default_folder(target, draft)
    for role, model in () if draft is None else (("draft", draft), ("target", target)):
        if out.resolve() == model.folder.resolve():
            raise SpecgenError(f"--out is {out}, the {role}'s own folder", f"Name another one: the {role} is not changed")
    command = "specgen " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    prompt_ids = [target.tokenizer.encode(prompt.text) for prompt in prompts]
    return loaded, ExitTrainingTask(
        out, recipe, corpus, prompt_ids, command, after=request.layer, layers=request.exit_layers, own_head=request.own_head
    )


def _load(models: ModelOptions, request: TrainRequest, loading: LoadingLine) -> _Models:
    """Load the target, and for sd the draft model."""
    import torch

    from specgen.engine.devices import pick_device, pick_dtype
    from specgen.engine.model_loading import check_tokenizers_match, load_model, prepare

    sources = _sources(models, request)
    device = pick_device(models.device)
    prepared, *drafts = [prepare(source, loading.announce) for source in sources]
    for draft in drafts:
        check_tokenizers_match(prepared, draft)
    dtype = pick_dtype(models.dtype, prepared.config.get_text_config(), prepared.folder, device)
    target = load_model(prepared, device, dtype, loading.announce)
    if not drafts:
        return _Models(target)
    draft_device = device if models.draft_device is None else pick_device(models.draft_device)
    stored = drafts[0].config.get_text_config().dtype
    loaded = load_model(drafts[0], draft_device, torch.float32, loading.announce)
    return _Models(target, loaded, stored if isinstance(stored, torch.dtype) else torch.float32)


def _sources(models: ModelOptions, request: TrainRequest) -> list[ModelSource]:
    """Where the target is loaded from, and for sd the draft model."""
    from specgen import demo
    from specgen.engine.model_loading import ModelSource

    if models.target is None:
        sources = [ModelSource(str(demo.folder(role)), f"demo/{role}") for role in demo.ROLES]
    else:
        sources = [ModelSource(models.target, None, models.revision, models.trust_remote_code, models.offline)]
        if models.draft is not None:
            sources.append(ModelSource(models.draft, None, models.draft_revision, models.trust_remote_code, models.offline))
    if request.kind == "sd" and len(sources) == 1:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")
    return sources if request.kind == "sd" else sources[:1]


def _corpus(models: ModelOptions, request: TrainRequest, target: LoadedModel) -> Corpus | None:
    """The corpus; None if there are only prompts. Raises SpecgenError if there is no text at all."""
    from specgen.training.corpus import demo_corpus, read_corpus

    encode = target.tokenizer.encode
    if request.corpus == _DEMO_CORPUS or (request.corpus is None and models.target is None):
        return demo_corpus(encode, request.seed, _DEMO_TOKENS)
    if request.corpus is not None:
        return read_corpus(request.corpus, encode)
    if request.prompts is None:
        raise SpecgenError(
            "there is no text to train on", "Give --corpus FILE (plain text or JSON lines), --prompts FILE or both"
        )
    if request.self_text == 0:
        raise SpecgenError("there is no text to train on: --self-text is 0 and there is no corpus", "Add --corpus FILE")
    return None


def _default_folder(target: LoadedModel, draft: LoadedModel | None) -> Path:
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.paths import exit_folder, pair_folder

    fingerprint = weights_fingerprint(target.folder)
    if draft is None:
        return exit_folder(target.name, fingerprint)
    return pair_folder(target.name, fingerprint, draft.name) / "distilled"


class Stop:
    """A context manager that turns the first Ctrl-C into a request to stop, which calling it returns; the second one raises
    KeyboardInterrupt."""

    def __init__(self) -> None:
        self._requested = False

    def __call__(self) -> bool:
        return self._requested

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
