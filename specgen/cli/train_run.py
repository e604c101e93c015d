"""`specgen tune --train`: the training of EESD's exit layer or of a draft model, from its request to its report."""

from __future__ import annotations

import json as jsonlib
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specgen import methods
from specgen.cli.error_reporting import INTERRUPTED
from specgen.errors import RunError, SpecgenError

if TYPE_CHECKING:
    import torch

    from specgen.cli.model_options import ModelOptions
    from specgen.engine.model_loading import LoadedModel, ModelSource, PreparedModel
    from specgen.training.corpus import Texts
    from specgen.training.distillation import DistillationResult
    from specgen.training.exit_training import ExitTrainingResult, ExitTrainingTask
    from specgen.training.training_loop import Progress
    from specgen.ui.terminal.loading_line import LoadingLine
    from specgen.ui.terminal.training_progress import TrainingBars

DEFAULT_MINUTES = 10.0
DEMO_CORPUS = Path("demo")  # a file of that name needs its whole path
_OPEN_TOKENS = 600_000  # of the demo pair's own corpus
_LEARNING_RATES = {"eesd": 1e-3, "sd": 3e-4}
_SELF_TEXT = 0.5  # of an exit's text; a draft is distilled on the target's word alone


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What was asked for, checked as far as that can be done without a model. `kind` is the method to train for, eesd or sd."""

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
    window: int | None
    learning_rate: float | None
    seed: int

    def __post_init__(self) -> None:
        if self.minutes is not None and self.steps is not None:
            raise SpecgenError("the budget is not clear: both --minutes and --steps are given", "Give one of them")
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
        if self.window is not None and self.window < 8:
            raise SpecgenError(f"--window is {self.window}", "It has to be at least 8 tokens")
        if not 0 <= self.exit_layers <= 2:
            raise SpecgenError(f"--exit-layers is {self.exit_layers}", "It has to be 0 (a head alone), 1 or 2")
        least = "above 0" if self.kind == "sd" else "from 0"
        if self.self_text is not None and not (0 <= self.self_text <= 1 and (self.self_text or self.kind != "sd")):
            raise SpecgenError(f"--self-text is {self.self_text}", f"It has to lie {least} to 1")
        if not 0 <= self.seed < 2**31:
            raise SpecgenError(f"--seed is {self.seed}", "It has to be a whole number from 0 to 2^31 - 1")
        if self.kind == "sd" and self.prompts is not None and self.corpus is not None and self.self_text in (None, 1):
            raise SpecgenError(
                f"--corpus is {self.corpus}, and with --prompts a draft learns from what the target says behind these alone",
                "Leave it out, or mix it in: --self-text 0.5",
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise SpecgenError(f"--out is {self.out}, which is a file", "Name a folder")


def request(method_names: str | None, head: str, **given: Any) -> TrainRequest:
    """Raises SpecgenError for whatever cannot be trained."""
    kind = _kind(method_names)
    if kind == "sd" and (given["layer"], given["exit_layers"], head) != (None, 1, "own"):
        raise SpecgenError("--layer, --exit-layers and --head are an exit's, and a draft model has none", "Leave them out")
    if head not in ("own", "target"):
        raise SpecgenError(f"--head is {head!r}", "Take own (trained) or target (the target's, as it is)")
    if given["minutes"] is None and given["steps"] is None:
        given["minutes"] = DEFAULT_MINUTES
    return TrainRequest(kind, **given, own_head=head == "own")


def _kind(names: str | None) -> str:
    kinds = set()
    for name in (names or "eesd").split(","):
        if name.strip() != "sd" and not name.strip().startswith("eesd"):
            methods.find(name.strip())  # a slip gets the nearest name
            raise SpecgenError(f"{name.strip()} has nothing to train", "Train an exit (--methods eesd) or a draft (--methods sd)")
        kinds.add("sd" if name.strip() == "sd" else "eesd")
    if len(kinds) > 1:
        raise SpecgenError("eesd and sd are trained in turn", "Give one of them")
    return kinds.pop()


def train(models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    from specgen.training.generated_text import TrainingStopped
    from specgen.ui.terminal.training_progress import TrainingBars

    loaded, draft, job = _prepare(models, request, err, quiet=quiet)
    _check_writable(job.out)
    with Stop() as stop, TrainingBars(err, quiet=quiet) as bars:
        bars.say(f"{loaded.name} on {loaded.device}, {loaded.dtype_name}; writing to {job.out}")
        try:
            outcome = _trained(loaded, draft, job, _Watcher(bars, stop))
        except TrainingStopped:
            bars.say(f"interrupted; the same command goes on from here (kept in {job.out / 'training'})")
            return INTERRUPTED
        except OSError as error:
            raise RunError(
                f"cannot write to {job.out}: {error.strerror or error}",
                "What was kept before is still there: make room, and go on",
            ) from error
    report = _report if draft is None else _report_draft
    report(outcome, err, quiet=quiet, as_json=as_json)
    return None


def _trained(target: LoadedModel, draft: Draft | None, job: ExitTrainingTask, watcher: _Watcher) -> Any:
    if draft is None:
        from specgen.training.exit_training import train_exit

        return train_exit(target, job, watcher)
    from specgen.training.distillation import distill

    return distill(target, draft.model, job, watcher, draft.stored)


def _check_writable(folder: Path) -> None:
    try:
        (folder / "training").mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise SpecgenError(f"cannot write to the folder {folder}", "Name another one with --out")


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model to train, in float32, and the dtype that its weights are stored in."""

    model: LoadedModel
    stored: torch.dtype


def _prepare(
    models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool
) -> tuple[LoadedModel, Draft | None, ExitTrainingTask]:
    """Load the target, for sd the draft, and the texts. What is heavy is imported here."""
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the hub reads it when it is imported, below
    from specgen.engine.devices import pick_device, pick_dtype
    from specgen.engine.model_loading import load_model, prepare
    from specgen.engine.tokenizer import check_same
    from specgen.training.exit_training import ExitTrainingTask, default_recipe, depth_for
    from specgen.ui.terminal.loading_line import LoadingLine

    sources = _sources(models, request)
    with LoadingLine(err, quiet=quiet) as loading:
        device = pick_device(models.device)
        prepared = [prepare(source, loading.announce) for source in sources]
        if request.kind == "sd":
            target, other = prepared
            check_same(target.tokenizer, other.tokenizer, target.name, other.name)
        found = prepared[0]
        dtype = pick_dtype(models.dtype, found.config.get_text_config(), found.folder, device)
        loaded = load_model(found, device, dtype, loading.announce)
        draft = None
        if request.kind == "sd":
            draft = _draft(prepared[1], device if models.draft_device is None else pick_device(models.draft_device), loading)
        else:
            depth_for(loaded, request.layer)
        loading.announce("reading texts")
        open_text = _open_text(models, request, loaded)
        prompts = _prompts(request, loaded)
    limit = min(model.context_limit for model in (loaded, draft.model if draft else loaded))
    recipe = default_recipe(device, limit)
    recipe = replace(
        recipe,
        steps=request.steps,
        seconds=None if request.minutes is None else 60 * request.minutes,
        learning_rate=request.learning_rate or _LEARNING_RATES[request.kind],
        batch=request.batch or recipe.batch,
        window=min(request.window or recipe.window, limit),
        self_text=_self_text(request, open_text),
        seed=request.seed,
    )
    out = request.out or _folder(loaded, draft)
    if draft is not None:
        for role, model in (("draft", draft.model), ("target", loaded)):
            if out.resolve() == model.folder.resolve():
                raise SpecgenError(f"--out is {out}, the {role}'s own folder", f"Name another one: the {role} stays as it is")
    note = "specgen " + " ".join(argument for argument in sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    return (
        loaded,
        draft,
        ExitTrainingTask(out, recipe, open_text, prompts, note, request.layer, request.exit_layers, request.own_head),
    )


def _sources(models: ModelOptions, request: TrainRequest) -> list[ModelSource]:
    """The target's, for sd the draft's too."""
    from specgen import demo
    from specgen.engine.model_loading import ModelSource

    if models.target is None:
        if models.draft is not None:
            raise SpecgenError(f"there is a draft model ({models.draft}) but no target", "Name the target too: --target MODEL")
        found = [ModelSource(str(demo.folder(role)), f"demo/{role}") for role in demo.ROLES]
    else:
        found = [ModelSource(models.target, None, models.revision, models.trust_remote_code, models.offline)]
        if models.draft is not None:
            found.append(ModelSource(models.draft, None, models.draft_revision, models.trust_remote_code, models.offline))
    if request.kind != "sd":
        return found[:1]
    if len(found) == 1:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")
    return found


def _draft(prepared: PreparedModel, device: torch.device, loading: LoadingLine) -> Draft:
    import torch

    from specgen.engine.model_loading import load_model

    stored = prepared.config.get_text_config().dtype
    return Draft(
        load_model(prepared, device, torch.float32, loading.announce),
        stored if isinstance(stored, torch.dtype) else torch.float32,
    )


def _self_text(request: TrainRequest, open_text: Texts | None) -> float:
    if open_text is None or (request.self_text is None and request.kind == "sd"):
        return 1.0
    return _SELF_TEXT if request.self_text is None else request.self_text


def _open_text(models: ModelOptions, request: TrainRequest, loaded: LoadedModel) -> Texts | None:
    """The corpus, None where there are prompts alone. Asked for once it is known that the model can be trained for."""
    from specgen.training.corpus import demo_texts, read_corpus

    encode = loaded.tokenizer.encode_long
    if request.corpus == DEMO_CORPUS or (request.corpus is None and models.target is None):
        return demo_texts(encode, request.seed, _OPEN_TOKENS)
    if request.corpus is not None:
        return read_corpus(request.corpus, encode)
    if request.prompts is None:
        raise SpecgenError("there is no text to train on", "Give some: --corpus FILE (open text), --prompts FILE or both")
    if request.self_text == 0:
        raise SpecgenError("there is no text to train on: --self-text is 0 and there is no corpus", "Add --corpus FILE")
    return None


def _folder(loaded: LoadedModel, draft: Draft | None) -> Path:
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.paths import exit_folder, pair_folder

    fingerprint = weights_fingerprint(loaded.folder)
    if draft is None:
        return exit_folder(loaded.name, fingerprint)
    return pair_folder(loaded.name, fingerprint, draft.model.name) / "distilled"


def _prompts(request: TrainRequest, loaded: LoadedModel) -> list[list[int]]:
    if request.prompts is None:
        return []
    from specgen.compare.prompts import load_prompts

    return [loaded.tokenizer.encode_long(prompt.text) for prompt in load_prompts(request.prompts)]


def _report(outcome: ExitTrainingResult, err: Console, *, quiet: bool, as_json: bool) -> None:
    description, fit = outcome.description, outcome.fit
    if as_json:
        line: dict[str, Any] = {
            "type": "train",
            "exit_layer": str(outcome.path),
            "target": description.target,
            "after": description.after,
            "agreement": outcome.agreement,
            "predictor": description.predictor,
            "figures": description.figures,
            "profile": str(outcome.path.parent),
        }
        print(jsonlib.dumps(line))
    else:
        print(outcome.path)
    if quiet:
        return
    from rich.text import Text

    said = (
        "" if outcome.agreement is None else f"; on its own text, kept apart, they agree on {outcome.agreement:.0%} of the tokens"
    )
    ranking = "no predictor: too little text" if fit is None else f"the predictor ranks {fit.ranking:.0%} of guesses rightly"
    err.print(Text(f"An exit after layer {description.after} of {description.target}{said}; {ranking}."), soft_wrap=True)


def _report_draft(distilled: DistillationResult, err: Console, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        print(jsonlib.dumps({"type": "train", "draft": str(distilled.path), "figures": distilled.figures}))
    else:
        print(distilled.path)
    if quiet:
        return
    from rich.text import Text

    agreements = [
        f"{distilled.after[name]:.1%} of the {name} tokens (before: {distilled.before[name]:.1%})"
        for name in distilled.after
        if distilled.after[name] is not None
    ]
    said = f"; on the target's own text, kept apart, they agree on {' and '.join(agreements)}" if agreements else ""
    err.print(Text(f"A draft distilled to its target{said}. Use it: --draft {distilled.path}"), soft_wrap=True)


class Stop:
    """A context manager: the first Ctrl-C asks for an end at the next good moment, the second one does not wait."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _Watcher:
    """Shows what happens, and passes a Ctrl-C on."""

    def __init__(self, bars: TrainingBars, stop: Stop) -> None:
        self._bars, self._stop = bars, stop

    def announce(self, what: str) -> None:
        self._bars.say(what)

    def writing(self, batches: int, share: float, tokens: int) -> None:
        self._bars.show("The target writes", share, f"{tokens:,} tokens")

    def training(self, progress: Progress) -> None:
        agrees = "" if progress.agreement is None else f", agrees {progress.agreement:.0%}"
        self._bars.show("Training", progress.share, f"step {progress.step}, loss {progress.loss:.3f}{agrees}")

    def stopping(self) -> bool:
        return self._stop.asked
