"""The command `specgen tune --train`: what can be trained, with which options, from which models and text, and what is printed.

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import EXIT_WEIGHTS, make_writable_folder, pair_folder, part_folder
from specgen.base.interrupts import interrupts
from specgen.base.text import print_json, print_result
from specgen.cli.opening import disable_hub_progress
from specgen.cli.options import ModelOptions, TrainingOptions, TuneOptions
from specgen.compare.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from specgen.engine.model_loading import LoadedModel
    from specgen.train.corpus import Corpus
    from specgen.train.loop import Objective
    from specgen.train.task import TrainingTask

DEFAULT_MINUTES = 10.0
_EXIT_OPTIONS = ("--layer", "--exit-layers", "--exit-head")
_HEAD_OPTIONS = (*_EXIT_OPTIONS, "--exit-layer")
_DEMO_CORPUS = Path("demo")  # a file of that name has to be given as ./demo or by its absolute path
_DEMO_TOKENS = 600_000
_NOTHING_HELD_OUT = " Nothing was held out to measure it: there are fewer than eight different documents or prompts."


@dataclass(frozen=True, slots=True)
class Trainable:
    """What can be trained. `name` is its kind with an article, `method` the value of `--methods` that trains it.

    `objective` is its class in `specgen.train`. The options `refused` do not apply to it. `learning_rate` and `self_text` are the
    defaults of these options.
    """

    name: str
    method: str
    objective: str
    refused: tuple[str, ...] = ()
    learning_rate: float = 1e-3
    self_text: float = 0.5


EXIT = Trainable("an exit layer", "eesd", "exits.ExitObjective")
PREDICTOR = Trainable(  # for the exit layer that --exit-layer names
    "a predictor",
    "eesd",
    "exits.PredictorObjective",
    (*_EXIT_OPTIONS, "--steps", "--self-text", "--batch-size", "--learning-rate"),
)
DRAFT = Trainable("a draft model", "sd", "distillation.DraftObjective", _HEAD_OPTIONS, 3e-4, 1.0)  # learns from own text only
HEADS = (
    Trainable("Medusa heads", "medusa", "medusa.MedusaObjective", _HEAD_OPTIONS, 3e-3),
    Trainable("an EAGLE head", "eagle", "eagle.EagleObjective", _HEAD_OPTIONS),
    Trainable("a GliDe head", "glide", "glide.GlideObjective", _HEAD_OPTIONS),
)
TRAINABLE = {each.method: each for each in (EXIT, DRAFT, *HEADS)}


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The command-line options of `specgen tune --train`; None: not given, use the default.

    Raises SpecgenError for values that are wrong for any model. Other errors are found when the models are loaded.
    """

    methods: str | None
    exit_head: str
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
        part, tiny, huge = self.part, sys.float_info.min, sys.float_info.max
        self._check_options_of(part)
        if self.exit_head not in ("own", "target"):
            hint = "Take own (a trained copy) or target (the target's head, unchanged)"
            raise SpecgenError(f"--exit-head is {self.exit_head!r}", hint)
        if self.minutes is not None and self.steps is not None:
            raise SpecgenError("both --minutes and --steps are given", "Give one of them")
        rules = (
            ("--minutes", self.minutes, tiny, huge, "above 0"),
            ("--steps", self.steps, 1, huge, "above 0"),
            ("--layer", self.layer, 1, huge, "above 0"),
            ("--batch-size", self.batch, 1, huge, "above 0"),
            ("--learning-rate", self.learning_rate, tiny, huge, "above 0"),
            ("--window", self.training_length, 8, huge, "at least 8 tokens"),
            ("--exit-layers", self.exit_layers, 0, 2, "0 (a head alone), 1 or 2"),
            ("--self-text", self.self_text, *((tiny, 1, "above 0 to 1") if part is DRAFT else (0, 1, "from 0 to 1"))),
            ("--seed", self.seed, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1"),
        )
        for option, value, least, most, rule in rules:
            if value is not None and not least <= value <= most:
                raise SpecgenError(f"{option} is {value}", f"It has to be {rule}")
        if self.chat and self.self_text is not None:
            raise SpecgenError("--self-text cannot be combined with --chat: the target then generates all text", "Leave it out")
        has_both = self.prompts is not None and self.corpus is not None
        if part is DRAFT and not self.chat and has_both and self.self_text in (None, 1):
            raise SpecgenError(
                f"--corpus {self.corpus} would not be used: with --prompts a draft learns from the target's continuations only",
                "Leave it out, or mix it in: --self-text 0.5",
            )

    def _check_options_of(self, part: Trainable) -> None:
        """Raises SpecgenError for options that are given but do not apply to `part`."""
        given = {
            "--layer": self.layer is not None,
            "--exit-layers": self.exit_layers != 1,
            "--exit-head": self.exit_head != "own",
            "--exit-layer": self.exit_layer is not None,
            "--steps": self.steps is not None,
            "--self-text": self.self_text is not None,
            "--batch-size": self.batch is not None,
            "--learning-rate": self.learning_rate is not None,
        }
        names = [name for name in part.refused if given[name]]
        if names:
            with_option = "--train --exit-layer" if part is PREDICTOR else f"--train --methods {part.method}"
            message = f"{', '.join(names)} cannot be combined with {with_option}, which trains {part.name}"
            raise SpecgenError(message, "Leave it out" if len(names) == 1 else "Leave them out")

    @property
    def part(self) -> Trainable:
        """What is trained. Raises SpecgenError if `methods` names a method that has nothing to train, or several parts."""
        names = {name.strip() for name in ("eesd" if self.methods is None else self.methods).split(",")}
        found = {"eesd" if name.startswith("eesd") else name for name in names}
        for name in sorted(found - TRAINABLE.keys()):
            methods.find(name)  # an unknown name gets its own message
            known = ", ".join(f"{part.name} ({part.method})" for part in TRAINABLE.values())
            raise SpecgenError(f"{name} has nothing to train", f"Name with --methods what to train: {known}")
        if len(found) > 1:
            raise SpecgenError(f"{' and '.join(sorted(found))} cannot be trained in one run", "Give one of them")
        return PREDICTOR if found == {"eesd"} and self.exit_layer is not None else TRAINABLE[found.pop()]


def train(
    models: ModelOptions, tuning: TuneOptions, seed: int, training: TrainingOptions, err: Console, *, quiet: bool, as_json: bool
) -> None:
    """Loads the models, trains, and prints the result. Raises KeyboardInterrupt if the user interrupted the training."""
    given = asdict(training)
    given.pop("train")
    request = TrainRequest(
        methods=tuning.methods,
        prompts=tuning.prompts,
        out=tuning.out,
        seed=seed,
        chat=tuning.chat,
        exit_layer=models.exit_layer,
        **given,
    )
    prompts = [] if request.prompts is None else load_prompts(request.prompts, for_tuning=True)
    if request.out is not None:
        make_writable_folder(request.out)
    disable_hub_progress(err, quiet=quiet)
    from rich.text import Text

    from specgen.train.loop import train as run
    from specgen.train.task import TrainingStopped
    from specgen.view.progress import Progress, TrainingLine

    with Progress(err, quiet=quiet) as loading:
        objective, draft = load_objective(models, request, loading.announce)
        loading.announce("reading texts")
        task = training_task(models, request, objective.target, draft, prompts)
        objective.check(task)
    make_writable_folder(task.folder)
    with interrupts.held(raises=False) as stop_requested, Progress(err, quiet=quiet) as progress:
        bars, target = TrainingLine(progress, stop_requested), objective.target
        bars.announce(f"{target.name} on {target.device}, {target.dtype_name}; output: {task.out}")
        try:
            path, made = run(objective, task, bars)
        except TrainingStopped:
            bars.announce(f"interrupted; the same command resumes from here (state in {task.folder})")
            raise KeyboardInterrupt from None
        except OSError as error:
            raise RunError(
                f"cannot write to {task.out}: {error.strerror or error}",
                "What was saved before is still there: free some space and run the same command again",
            ) from error
    report = _draft_report if request.part is DRAFT else _head_report if request.part in HEADS else _exit_report
    fields, sentence = report(request, path, made)
    if as_json:
        print_json({"type": "train", **fields})
    else:
        print_result(str(path))
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)


def load_objective(
    models: ModelOptions, request: TrainRequest, announce: Callable[[str], None]
) -> tuple[Objective, LoadedModel | None]:
    """Loads the models. Returns what is trained, and the draft model, None unless it is trained.

    Transformers trains and saves it, whichever backend runs the target. Raises SpecgenError if it cannot be trained.
    """
    from specgen.engine.devices import pick_device
    from specgen.engine.dtype_choice import choose_dtype
    from specgen.engine.model_loading import load_model, prepare
    from specgen.engine.spread.placement import place
    from specgen.pair.loading import model_sources

    part = request.part
    if part is DRAFT and not models.has_draft:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")
    named = models.target, models.draft, models.revision, models.draft_revision, models.trust_remote_code, models.offline
    target_source, *draft_sources = model_sources(*named, models.backend)
    sources = [target_source, *(replace(source, backend="transformers") for source in draft_sources if part is DRAFT)]
    device = pick_device(models.device)
    prepared, *drafts = (prepare(source, announce) for source in sources)
    if drafts and (quantised := drafts[0].quantisation) is not None:
        raise SpecgenError(
            f"the draft {drafts[0].name} cannot be trained: its weights are quantised with {quantised.get('quant_method')}",
            "Train the checkpoint that it was made from; drafts are quantised after training",
        )
    translation = _translation(prepared, drafts[0]) if drafts else None
    chosen = choose_dtype(models.dtype, prepared, device)
    placement = place(models.device, [prepared], [chosen], None)
    on, layer_devices = (device, None) if placement is None else (placement.device, placement.layer_devices)
    target = load_model(prepared, on, chosen.dtype, announce, layer_devices=layer_devices)
    module, name = part.objective.split(".")
    make: Callable[..., Objective] = getattr(import_module(f"specgen.train.{module}"), name)
    if part is DRAFT:
        draft, dtype = _load_draft(models, drafts[0], device, announce)
        draft.translation = translation
        return make(target, draft, dtype), draft
    if part is EXIT:
        own_head = request.exit_head == "own"
        return make(target, after=request.layer, layers=request.exit_layers, own_head=own_head), None
    return make(target, *([request.exit_layer] if part is PREDICTOR else [])), None


def _translation(target: Any, draft: Any) -> Any:
    from specgen.engine.model_loading import translation_between
    from specgen.engine.text.token_bytes import NoTokenBytes

    try:
        return translation_between(target, draft)
    except NoTokenBytes as error:
        hint = "Take a draft of the target's family, or one whose tokens are pieces of text"
        raise SpecgenError(error.message, hint) from error


def _load_draft(
    models: ModelOptions, prepared: Any, device: torch.device, announce: Callable[[str], None]
) -> tuple[LoadedModel, torch.dtype]:
    """Returns a draft model in float32, and the dtype in which its weights are to be saved: that of its files."""
    import torch

    from specgen.engine.devices import DTYPES, pick_draft_device
    from specgen.engine.model_loading import load_model

    draft_device = pick_draft_device(models.draft_device, models.device, device)
    draft = load_model(prepared, draft_device, torch.float32, announce)
    return draft, DTYPES.get(str(prepared.shape.dtype), torch.float32)


def training_task(
    models: ModelOptions, request: TrainRequest, target: LoadedModel, draft: LoadedModel | None, prompts: Sequence[Prompt]
) -> TrainingTask:
    """Returns the training task: reads the corpus, and sets defaults for options that are not given.

    `prompts` are those of `--prompts`.
    """
    from specgen.train.task import Recipe, TrainingTask

    part, limit = request.part, min(model.context_limit for model in (target, draft or target))
    on_cuda = target.device.type == "cuda"  # elsewhere a step with the paper's batch size would take minutes
    training_length = min(request.training_length or (2048 if on_cuda else 256), limit)
    corpus = _corpus(models, request, target)
    ids = _prompts(request, prompts, target, training_length)
    has_budget = request.steps is not None or (part is PREDICTOR and request.minutes is None)  # the latter needs none
    recipe = Recipe(
        steps=request.steps,
        seconds=None if has_budget else 60 * (request.minutes or DEFAULT_MINUTES),
        learning_rate=request.learning_rate or part.learning_rate,
        batch=request.batch or (64 if on_cuda else 16),
        window=training_length,
        self_text=1.0 if corpus is None else part.self_text if request.self_text is None else request.self_text,
        seed=request.seed,
    )
    out = _output_folder(request, target, draft) if request.out is None else request.out
    if draft is not None and out.resolve() in (draft.folder.resolve(), target.folder.resolve()):
        raise SpecgenError(f"--out is {out}, the folder of one of the models", "Name another one: the models are not changed")
    command = "specgen " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    return TrainingTask(out, recipe, corpus, ids, command)


def _output_folder(request: TrainRequest, target: LoadedModel, draft: LoadedModel | None) -> Path:
    """Returns the folder for the result if the user names none."""
    from specgen.engine.parts.trained_part import EXIT_DESCRIPTION
    from specgen.engine.weights import weights_fingerprint

    if (exit_layer := request.exit_layer) is not None:
        if exit_layer.is_dir() or exit_layer.name in (EXIT_WEIGHTS, EXIT_DESCRIPTION):
            return exit_layer if exit_layer.is_dir() else exit_layer.parent
        raise SpecgenError(f"the exit layer is {exit_layer}, and --out is not given", "Name a folder: --out DIR")
    fingerprint = weights_fingerprint(target.folder)
    if request.part in HEADS:
        return part_folder(request.part.method, target.name, fingerprint)
    folder = pair_folder(target.name, fingerprint, None if draft is None else draft.name)
    return folder if draft is None else folder / "distilled"


def _prompts(request: TrainRequest, given: Sequence[Prompt], target: LoadedModel, training_length: int) -> list[list[int]]:
    """Returns the prompts that the target continues, as token ids: those of `--prompts`, which are `given`; none if it continues
    the corpus.

    With --chat, they are in the model's chat template and may also be in the corpus file. Longer ones than three quarters of a
    training sequence are then left out, because a template cannot be cut.
    """
    from specgen.train.corpus import chat_prompts

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
    from specgen.train.corpus import demo_corpus, read_corpus

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


def _exit_report(request: TrainRequest, path: Path, made: Any) -> tuple[dict[str, Any], str]:
    """Returns the fields for JSON output and a sentence for the user about a saved exit layer."""
    share, fit = made.figures["held_out_agreement"]["greedy"], made.figures.get("predictor")
    named = {"exit_layer": str(path), "target": made.target, "after": made.after, "agreement": share}
    fields = named | {"predictor": made.predictor, "figures": made.figures, "profile": str(path.parent)}
    agreement = _NOTHING_HELD_OUT if share is None else f" Greedy agreement on held-out text: {share:.0%}."
    predictor = "" if made.predictor else " No predictor: too little text."
    if fit is not None:
        predictor = f" Predictor: mean score {fit['mean_score']:.2f} where {fit['accepted']:.2f} is accepted"
        predictor += f", area under the ROC curve {fit['ranking']:.2f}."
    what = "a predictor for the exit" if request.part is PREDICTOR else f"an exit after layer {made.after}"
    return fields, f"Trained {what} of {made.target}.{agreement}{predictor}"


def _draft_report(_: TrainRequest, path: Path, figures: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the same about a draft. It is recommended only if it predicts more of the target's greedy tokens than before."""
    before, after = figures["agreement_before"], figures["agreement"]
    shares = [f"{after[kind]:.1%} of the {kind} tokens (before: {before[kind]:.1%})" for kind in after if after[kind] is not None]
    agreement = f" Greedy agreement on held-out text: {', '.join(shares)}." if shares else _NOTHING_HELD_OUT
    if figures.get("acceptance") is not None:
        acceptance = f"{figures['acceptance']:.1%} (before: {figures['acceptance_before']:.1%})"
        agreement += f" Expected acceptance at temperature 1: {acceptance}; the vocabularies allow {figures['common']:.1%}."
    advice = f"Use it: --draft {path}"
    if shares and (after["greedy"] or 0) <= (before["greedy"] or 0):
        advice = f"Agreement on greedy tokens did not rise: keep the draft you have. The new one is in {path}"
    return {"draft": str(path), "figures": figures}, f"Distilled a draft model.{agreement} {advice}"


def _head_report(request: TrainRequest, path: Path, made: Any) -> tuple[dict[str, Any], str]:
    """Returns the same about a head."""
    shares = made.figures["held_out_agreement"]["greedy"]
    fields = {"head": str(path), "kind": made.kind, "target": made.target, "agreement": shares, "figures": made.figures}
    by_depth = ", ".join(f"{share:.0%}" for share in shares or [])
    agreement = f" Greedy agreement on held-out text, token by token of a draft: {by_depth}." if by_depth else _NOTHING_HELD_OUT
    return fields, f"Trained {request.part.name} for {made.target}.{agreement}"
