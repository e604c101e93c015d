"""`specgen tune --train`: the training of EESD's exit layer, from its request to its report."""

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
from specgen.cli.reporting import INTERRUPTED
from specgen.errors import RunError, SpecgenError

if TYPE_CHECKING:
    from specgen.cli.models import ModelOptions
    from specgen.models.load import LoadedModel
    from specgen.tuning.exits import Job, Outcome
    from specgen.tuning.texts import Texts
    from specgen.tuning.training import Progress
    from specgen.ui.training import TrainingBars

DEMO_CORPUS = Path("demo")  # a file of that name needs its whole path
DEFAULT_MINUTES = 10.0
_OPEN_TOKENS = 600_000  # of the demo pair's own corpus


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, checked as far as that can be done without a model."""

    minutes: float | None
    steps: int | None
    corpus: Path | None
    prompts: Path | None
    out: Path | None
    layer: int | None
    exit_layers: int
    own_head: bool
    self_text: float
    batch: int | None
    window: int | None
    learning_rate: float
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
        if not 0 <= self.self_text <= 1:
            raise SpecgenError(f"--self-text is {self.self_text}", "It has to lie between 0 and 1")
        if not 0 <= self.seed < 2**31:
            raise SpecgenError(f"--seed is {self.seed}", "It has to be a whole number from 0 to 2^31 - 1")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise SpecgenError(f"--out is {self.out}, which is a file", "Name a folder")


def request(method_names: str | None, head: str, **given: Any) -> Request:
    """Raises SpecgenError for whatever cannot be trained."""
    _check_methods(method_names)
    if head not in ("own", "target"):
        raise SpecgenError(f"--head is {head!r}", "Take own (trained) or target (the target's, as it is)")
    if given["minutes"] is None and given["steps"] is None:
        given["minutes"] = DEFAULT_MINUTES
    return Request(**given, own_head=head == "own")


def _check_methods(names: str | None) -> None:
    for name in (names or "eesd").split(","):
        if not name.strip().startswith("eesd"):
            methods.find(name.strip())  # a slip gets the nearest name
            raise SpecgenError(f"{name.strip()} has nothing to train", "Train for eesd: --methods eesd")


def train(models: ModelOptions, request: Request, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    from specgen.tuning.exits import train_exit
    from specgen.tuning.selftext import Stopped
    from specgen.ui.training import TrainingBars

    loaded, job = _prepare(models, request, err, quiet=quiet)
    _check_writable(job.out)
    with Stop() as stop, TrainingBars(err, quiet=quiet) as bars:
        bars.say(f"{loaded.name} on {loaded.device}, {loaded.dtype_name}; writing to {job.out}")
        try:
            outcome = train_exit(loaded, job, _Watcher(bars, stop))
        except Stopped:
            bars.say(f"interrupted; the same command goes on from here (kept in {job.out / 'training'})")
            return INTERRUPTED
        except OSError as error:
            raise RunError(
                f"cannot write to {job.out}: {error.strerror or error}",
                "What was kept before is still there: make room, and go on",
            ) from error
    _report(outcome, err, quiet=quiet, as_json=as_json)
    return None


def _check_writable(folder: Path) -> None:
    try:
        (folder / "training").mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise SpecgenError(f"cannot write to the folder {folder}", "Name another one with --out")


def _prepare(models: ModelOptions, request: Request, err: Console, *, quiet: bool) -> tuple[LoadedModel, Job]:
    """Load the target alone, and the texts. What is heavy is imported here."""
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the hub reads it when it is imported, below
    from specgen import demo
    from specgen.models.devices import pick_device, pick_dtype
    from specgen.models.load import Source, load_model, prepare
    from specgen.tuning.exits import Job, default_recipe, depth_for
    from specgen.ui.progress import LoadingLine

    source = Source(str(demo.folder("target")), "demo/target")
    if models.target is not None:
        source = Source(models.target, None, models.revision, models.trust_remote_code, models.offline)
    with LoadingLine(err, quiet=quiet) as loading:
        device = pick_device(models.device)
        found = prepare(source, loading.announce)
        dtype = pick_dtype(models.dtype, found.config.get_text_config(), found.folder, device)
        loaded = load_model(found, device, dtype, loading.announce)
        depth_for(loaded, request.layer)
        loading.announce("reading texts")
        open_text = _open_text(models, request, loaded)
        prompts = _prompts(request, loaded)
    recipe = default_recipe(device, loaded.context_limit)
    recipe = replace(
        recipe,
        steps=request.steps,
        seconds=None if request.minutes is None else 60 * request.minutes,
        learning_rate=request.learning_rate,
        batch=request.batch or recipe.batch,
        window=min(request.window or recipe.window, loaded.context_limit),
        self_text=1.0 if open_text is None else request.self_text,
        seed=request.seed,
    )
    out = request.out or _folder(loaded)
    note = "specgen " + " ".join(argument for argument in sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    return loaded, Job(out, recipe, request.layer, request.exit_layers, request.own_head, open_text, prompts, note)


def _open_text(models: ModelOptions, request: Request, loaded: LoadedModel) -> Texts | None:
    """The corpus, None where there are prompts alone. Asked for once it is known that the model can be trained for."""
    from specgen.tuning.texts import demo_texts, read_corpus

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


def _folder(loaded: LoadedModel) -> Path:
    from specgen.models.fingerprint import weights_fingerprint
    from specgen.tuning.places import exit_folder

    return exit_folder(loaded.name, weights_fingerprint(loaded.folder))


def _prompts(request: Request, loaded: LoadedModel) -> list[list[int]]:
    if request.prompts is None:
        return []
    from specgen.bench.prompts import load_prompts

    return [loaded.tokenizer.encode_long(prompt.text) for prompt in load_prompts(request.prompts)]


def _report(outcome: Outcome, err: Console, *, quiet: bool, as_json: bool) -> None:
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
