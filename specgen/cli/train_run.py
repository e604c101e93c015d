"""The command `specgen tune --train`: trains an exit layer (EESD) or distils a draft model, and prints the result."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen import methods
from specgen.cli.error_reporting import INTERRUPTED
from specgen.cli.model_options import ModelOptions, disable_hub_progress
from specgen.compare.prompts import Prompt, load_prompts
from specgen.errors import RunError, SpecgenError
from specgen.files import make_writable_folder
from specgen.json_lines import print_json
from specgen.sanitize import print_result

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from specgen.engine.model_loading import LoadedModel
    from specgen.training.corpus import Corpus
    from specgen.training.training_task import TrainingObserver, TrainingTask

DEFAULT_MINUTES = 10.0
_DEMO_CORPUS = Path("demo")  # a file of that name has to be given as ./demo or by its absolute path
_DEMO_TOKENS = 600_000
_NOTHING_HELD_OUT = " Nothing was held out to measure it: there are fewer than eight different documents or prompts."


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The command-line options of `specgen tune --train`; None: not given, use the default.

    Raises SpecgenError for values that are wrong for any model. Other errors are found when the models are loaded.
    """

    methods: str | None
    head: str
    minutes: float | None
    steps: int | None
    corpus: Path | None
    prompts: Path | None
    out: Path | None
    layer: int | None
    exit_layers: int
    self_text: float | None
    batch: int | None
    training_length: int | None
    learning_rate: float | None
    seed: int
    chat: bool = False
    exit_layer: Path | None = None

    def __post_init__(self) -> None:
        if self.exit_layer is not None:
            self._check_predictor_options()
        if self.is_draft and (self.layer, self.exit_layers, self.head) != (None, 1, "own"):
            raise SpecgenError(
                "--layer, --exit-layers and --head belong to an exit layer, not to a draft model", "Leave them out"
            )
        if self.head not in ("own", "target"):
            raise SpecgenError(f"--head is {self.head!r}", "Take own (a trained copy) or target (the target's head, unchanged)")
        if self.minutes is not None and self.steps is not None:
            raise SpecgenError("both --minutes and --steps are given", "Give one of them")
        tiny, huge = sys.float_info.min, sys.float_info.max
        rules = (
            ("--minutes", self.minutes, tiny, huge, "above 0"),
            ("--steps", self.steps, 1, huge, "above 0"),
            ("--layer", self.layer, 1, huge, "above 0"),
            ("--batch-size", self.batch, 1, huge, "above 0"),
            ("--learning-rate", self.learning_rate, tiny, huge, "above 0"),
            ("--window", self.training_length, 8, huge, "at least 8 tokens"),
            ("--exit-layers", self.exit_layers, 0, 2, "0 (a head alone), 1 or 2"),
            ("--self-text", self.self_text, tiny if self.is_draft else 0, 1, f"{'above' if self.is_draft else 'from'} 0 to 1"),
            ("--seed", self.seed, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1"),
        )
        for option, value, least, most, rule in rules:
            if value is not None and not least <= value <= most:
                raise SpecgenError(f"{option} is {value}", f"It has to be {rule}")
        if self.chat and self.self_text is not None:
            raise SpecgenError("--self-text cannot be combined with --chat: the target then generates all text", "Leave it out")
        has_both = self.prompts is not None and self.corpus is not None
        if self.is_draft and not self.chat and has_both and self.self_text in (None, 1):
            raise SpecgenError(
                f"--corpus {self.corpus} would not be used: with --prompts a draft learns from the target's continuations only",
                "Leave it out, or mix it in: --self-text 0.5",
            )

    def _check_predictor_options(self) -> None:
        """Checks the options for `exit_layer`, with which only a new predictor for this exit layer is trained."""
        if self.is_draft:
            raise SpecgenError("--exit-layer belongs to the eesd methods, not to a draft model", "Leave it out")
        given = {
            "--layer": self.layer is not None,
            "--exit-layers": self.exit_layers != 1,
            "--head": self.head != "own",
            "--steps": self.steps is not None,
            "--self-text": self.self_text is not None,
            "--batch-size": self.batch is not None,
            "--learning-rate": self.learning_rate is not None,
        }
        names = [name for name, is_given in given.items() if is_given]
        if names:
            raise SpecgenError(
                f"{', '.join(names)} cannot be combined with --train --exit-layer, which trains only a predictor", "Leave it out"
            )

    @property
    def is_draft(self) -> bool:
        """Whether a draft model is trained (True) or an exit layer (False).

        Raises SpecgenError if `methods` names a method that has nothing to train, or both kinds of training.
        """
        names = {name.strip() for name in ("eesd" if self.methods is None else self.methods).split(",")}
        for name in sorted(names):
            if name != "sd" and not name.startswith("eesd"):
                methods.find(name)  # an unknown name gets its own message
                raise SpecgenError(f"{name} has nothing to train", "Train an exit (--methods eesd) or a draft (--methods sd)")
        if "sd" in names and len(names) > 1:
            raise SpecgenError("eesd and sd cannot be trained in one run", "Give one of them")
        return "sd" in names


def train(models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    """Loads the models, trains, and prints the result. Returns None, or an exit code if the user interrupted the training."""
    prompts = [] if request.prompts is None else load_prompts(request.prompts, for_tuning=True)
    if request.out is not None:
        make_writable_folder(request.out)
    disable_hub_progress(err, quiet=quiet)
    from rich.text import Text

    from specgen.engine.exit_files import load_exit
    from specgen.training.exit_training import exit_depth
    from specgen.training.training_task import TrainingStopped
    from specgen.ui.terminal.loading_line import LoadingLine
    from specgen.ui.terminal.training_progress import TrainingBars

    with LoadingLine(err, quiet=quiet) as loading:
        target, draft, dtype = _load(models, request, loading.announce)
        if request.exit_layer is not None:
            load_exit(request.exit_layer, target)  # raises its errors before the texts are read
        elif draft is None:
            exit_depth(target, request.layer)
        loading.announce("reading texts")
        task = _task(models, request, target, draft, prompts)
    make_writable_folder(task.folder)
    with _stop_on_interrupt() as stop_requested, TrainingBars(err, stop_requested, quiet=quiet) as bars:
        bars.announce(f"{target.name} on {target.device}, {target.dtype_name}; output: {task.out}")
        try:
            if draft is None:
                path, fields, sentence = _train_exit(target, request, task, bars)
            else:
                path, fields, sentence = _train_draft(target, draft, dtype, task, bars)
        except TrainingStopped:
            bars.announce(f"interrupted; the same command resumes from here (state in {task.folder})")
            return INTERRUPTED
        except OSError as error:
            raise RunError(
                f"cannot write to {task.out}: {error.strerror or error}",
                "What was saved before is still there: free some space and run the same command again",
            ) from error
    if as_json:
        print_json({"type": "train", **fields})
    else:
        print_result(str(path))
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)
    return None


def _train_exit(
    target: LoadedModel, request: TrainRequest, task: TrainingTask, observer: TrainingObserver
) -> tuple[Path, dict[str, Any], str]:
    """Trains an exit layer. Returns the path of its weights, the fields for JSON output, and a sentence for the user."""
    from specgen.training.exit_training import retrain_predictor, train_exit

    if request.exit_layer is not None:
        path, description = retrain_predictor(target, request.exit_layer, task, observer)
    else:
        path, description = train_exit(
            target, task, observer, after=request.layer, layers=request.exit_layers, own_head=request.head == "own"
        )
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
    what = f"an exit after layer {description.after}" if request.exit_layer is None else "a predictor for the exit"
    agreement = _NOTHING_HELD_OUT if share is None else f" Greedy agreement on held-out text: {share:.0%}."
    predictor = "" if description.predictor else " No predictor: too little text."
    if fit is not None:
        predictor = f" Predictor: mean score {fit['mean_score']:.2f} where {fit['accepted']:.2f} is accepted"
        predictor += f", area under the ROC curve {fit['ranking']:.2f}."
    return path, fields, f"Trained {what} of {description.target}.{agreement}{predictor}"


def _train_draft(
    target: LoadedModel, draft: LoadedModel, dtype: torch.dtype, task: TrainingTask, observer: TrainingObserver
) -> tuple[Path, dict[str, Any], str]:
    """Distils the draft. Returns the path of the new draft, the fields for JSON output, and a sentence for the user.

    The sentence recommends the new draft only if it predicts more of the target's greedy tokens than before.
    """
    from specgen.training.distillation import distill

    figures = distill(target, draft, task, observer, dtype)
    before, after = figures["agreement_before"], figures["agreement"]
    shares = [f"{after[kind]:.1%} of the {kind} tokens (before: {before[kind]:.1%})" for kind in after if after[kind] is not None]
    agreement = f" Greedy agreement on held-out text: {', '.join(shares)}." if shares else _NOTHING_HELD_OUT
    advice = f"Use it: --draft {task.out}"
    if shares and (after["greedy"] or 0) <= (before["greedy"] or 0):
        advice = f"Agreement on greedy tokens did not rise: keep the draft you have. The new one is in {task.out}"
    return task.out, {"draft": str(task.out), "figures": figures}, f"Distilled a draft model.{agreement} {advice}"


def _load(
    models: ModelOptions, request: TrainRequest, announce: Callable[[str], None]
) -> tuple[LoadedModel, LoadedModel | None, torch.dtype]:
    """Loads the models. Returns the target, the draft, and the dtype in which the draft's weights are to be saved.

    The draft is loaded in float32, by transformers, which trains and saves it, whichever backend runs the target. It is None if
    an exit layer is trained; the dtype then has no meaning.
    """
    import torch

    from specgen.engine.devices import DTYPES, pick_device
    from specgen.engine.dtype_choice import choose_dtype
    from specgen.engine.model_loading import load_model
    from specgen.loading import model_sources, prepare_models

    if request.is_draft and not models.has_draft:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")
    named = models.target, models.draft, models.revision, models.draft_revision, models.trust_remote_code, models.offline
    target_source, *draft_sources = model_sources(*named, models.backend)
    sources = [target_source, *(replace(source, backend="transformers") for source in draft_sources if request.is_draft)]
    device = pick_device(models.device)
    prepared, *drafts = prepare_models(sources, announce)
    dtype = choose_dtype(models.dtype, prepared.shape, prepared.folder, device, prepared.config.architecture).dtype
    target = load_model(prepared, device, dtype, announce)
    if not drafts:
        return target, None, torch.float32
    draft = load_model(drafts[0], pick_device(models.draft_device or models.device), torch.float32, announce)
    stored = drafts[0].shape.dtype
    return target, draft, DTYPES.get(str(stored), torch.float32)


def _task(
    models: ModelOptions, request: TrainRequest, target: LoadedModel, draft: LoadedModel | None, prompts: Sequence[Prompt]
) -> TrainingTask:
    """Returns the training task: reads the corpus, and sets defaults for options that are not given.

    `draft` is the draft model to distil, or None to train an exit layer. `prompts` are those of `--prompts`.
    """
    from specgen.training.training_task import Recipe, TrainingTask

    share = (0.5 if draft is None else 1.0) if request.self_text is None else request.self_text
    limit = min(model.context_limit for model in (target, draft or target))
    on_cuda = target.device.type == "cuda"  # elsewhere a step with the paper's batch size would take minutes
    training_length = min(request.training_length or (2048 if on_cuda else 256), limit)
    corpus = _corpus(models, request, target)
    ids = _prompts(request, prompts, target, training_length)
    recipe = Recipe(
        steps=request.steps,
        seconds=_seconds(request),
        learning_rate=request.learning_rate or (1e-3 if draft is None else 3e-4),
        batch_size=request.batch or (64 if on_cuda else 16),
        training_length=training_length,
        generated_share=1.0 if corpus is None else share,
        seed=request.seed,
    )
    out = _output_folder(request, target, draft) if request.out is None else request.out
    if draft is not None and out.resolve() in (draft.folder.resolve(), target.folder.resolve()):
        raise SpecgenError(f"--out is {out}, the folder of one of the models", "Name another one: the models are not changed")
    command = "specgen " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    return TrainingTask(out, recipe, corpus, ids, command)


def _seconds(request: TrainRequest) -> float | None:
    """Returns the budget in seconds; None: it is a number of steps, or a predictor alone is trained, which needs no budget."""
    if request.steps is not None or (request.exit_layer is not None and request.minutes is None):
        return None
    return 60 * (request.minutes or DEFAULT_MINUTES)


def _output_folder(request: TrainRequest, target: LoadedModel, draft: LoadedModel | None) -> Path:
    """Returns the folder for the result if the user names none."""
    from specgen.engine.exit_files import DESCRIPTION, WEIGHTS
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.paths import pair_folder

    if request.exit_layer is not None:
        if request.exit_layer.is_dir():
            return request.exit_layer
        if request.exit_layer.name in (WEIGHTS, DESCRIPTION):
            return request.exit_layer.parent
        raise SpecgenError(f"the exit layer is {request.exit_layer}, and --out is not given", "Name a folder: --out DIR")
    folder = pair_folder(target.name, weights_fingerprint(target.folder), None if draft is None else draft.name)
    return folder if draft is None else folder / "distilled"


def _prompts(request: TrainRequest, given: Sequence[Prompt], target: LoadedModel, training_length: int) -> list[list[int]]:
    """Returns the prompts that the target continues, as token ids: those of `--prompts`, which are `given`; none if it continues
    the corpus.

    With --chat, they are in the model's chat template and may also be in the corpus file. Longer ones than three quarters of a
    training sequence are then left out, because a template cannot be cut.
    """
    from specgen.training.corpus import chat_prompts

    if not request.chat:
        return [target.tokenizer.encode(prompt.text) for prompt in given]
    limit = 3 * training_length // 4
    prompts = [ids for prompt in given if len(ids := target.tokenizer.chat(prompt.text, None)) <= limit]
    if given and not prompts:
        raise SpecgenError(f"{request.prompts} has no prompt of at most {limit} tokens", "Give shorter ones or a larger --window")
    if request.corpus == _DEMO_CORPUS:
        raise SpecgenError("--corpus demo has no conversations for --chat", "Leave --chat out, or name a file of prompts")
    if request.corpus is not None:
        prompts += chat_prompts(request.corpus, target.tokenizer, limit)
    if not prompts:
        raise SpecgenError("there are no prompts for --chat", "Give --corpus FILE (prompts or messages) or --prompts FILE")
    return prompts


def _corpus(models: ModelOptions, request: TrainRequest, target: LoadedModel) -> Corpus | None:
    """Reads the corpus. Returns None if only prompts are given. Raises SpecgenError if there is no text."""
    from specgen.training.corpus import demo_corpus, read_corpus

    encode = target.tokenizer.encode
    if request.chat:
        return None
    if request.corpus == _DEMO_CORPUS or (request.corpus is None and models.target is None):
        return demo_corpus(encode, request.seed, _DEMO_TOKENS)
    if request.corpus is not None:
        return read_corpus(request.corpus, encode)
    if request.prompts is None or request.self_text == 0:
        hint = "Give --corpus FILE (plain text or JSON lines), or --prompts FILE and leave --self-text above 0"
        raise SpecgenError("there is no text to train on", hint)
    return None


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed. The first Ctrl-C does nothing else; the second one interrupts."""
    received: list[int] = []

    def handle(signum: int, _: object) -> None:
        received.append(signum)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
