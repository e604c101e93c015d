"""`specgen tune`: find the fastest method and settings for a pair, or with `--train` train a part that drafts for a target."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specgen.base.errors import SpecgenError
from specgen.base.machine import launch
from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.cli.model_options import ModelOptions
from specgen.cli.train import DEFAULT_MINUTES, TrainRequest
from specgen.cli.train import train as run_training

_METHODS = "Only these, separated by commas; with --train one of: eesd, sd, medusa, eagle, glide."
_PROMPTS = (
    "Prompts to tune on, in compare's formats; by default those of examples.yaml that compare leaves out. With --train: those "
    "that the target continues."
)
_EXPORT = "Print the tuned settings for transformers, vllm, sglang, tensorrt-llm, llama.cpp or mlx; uses an existing profile."
_OBJECTIVE = "Choose the settings of lossy methods (mtad, bild) by speed under --max-perplexity, or by the lowest perplexity."
_MAX_PERPLEXITY = "The largest perplexity of a lossy method's output, or its percentage of plain decoding's (100%)."
_OUT = "The profile's folder; by default one for this pair in your data folder."
_CORPUS = "Training text: plain, or JSON lines with text (with --chat also prompt or messages); demo: the bundled pair's own."
_SELF_TEXT = "Share of sequences that the target generates (0.5; for sd: that it labels, 1)."
_LEARNING_RATE = "Peak learning rate (0.001; for sd 0.0003); it decays to a tenth."
_ALSO_FOR_TRAINING = {"methods", "prompts", "chat", "out", "seed"}
_training = partial(typer.Option, rich_help_panel="Training")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options for tuning. With `--train`, only `methods`, `prompts`, `chat` and `out` can be given."""

    methods: Annotated[str | None, typer.Option("--methods", "-m", metavar="LIST", help=_METHODS)] = None
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time for everything, loading included.")] = 60.0
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_PROMPTS)] = None
    category: options.Category = None
    limit: Annotated[int, typer.Option(metavar="N", help="Number of prompts, taken from each category in turn.")] = 8
    chat: options.CompareChat = False
    objective: Annotated[str, typer.Option(metavar="speed|perplexity", help=_OBJECTIVE)] = "speed"
    max_perplexity: Annotated[str | None, typer.Option("--max-perplexity", metavar="X|P%", help=_MAX_PERPLEXITY)] = None
    export: Annotated[str | None, typer.Option(metavar="ENGINE", help=_EXPORT)] = None
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=_OUT)] = None


@dataclass(frozen=True, slots=True)
class TuneSampling(options.SamplingOptions):
    """Options for choosing tokens during tuning. With `--train`, only the seed can be given."""

    max_new_tokens: options.MaxNewTokens = 64
    seed: options.FixedSeed = 0


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options for training an exit layer, a draft model or a head: only with `--train`."""

    minutes: Annotated[float | None, _training(metavar="M", help=f"Total training time ({DEFAULT_MINUTES:g}).")] = None
    steps: Annotated[int | None, _training(metavar="S", help="Optimizer steps instead of minutes: reproducible weights.")] = None
    corpus: Annotated[Path | None, _training(metavar="FILE", help=_CORPUS)] = None
    layer: Annotated[int | None, _training(metavar="N", help="Put the exit after layer N (7 % of the layers).")] = None
    exit_layers: Annotated[int, _training(metavar="0|1|2", help="Layers in the exit; 0: only a head.")] = 1
    exit_head: Annotated[str, _training(metavar="own|target", help="Train the exit's LM head, or use the target's.")] = "own"
    self_text: Annotated[float | None, _training(metavar="SHARE", help=_SELF_TEXT)] = None
    batch: Annotated[int | None, _training("--batch-size", metavar="B", help="Sequences per step (64; on a CPU 16).")] = None
    training_length: Annotated[
        int | None, _training("--window", metavar="W", help="Tokens per sequence (2048; on a CPU 256).")
    ] = None
    learning_rate: Annotated[float | None, _training(metavar="R", help=_LEARNING_RATE)] = None


@reported
@options.grouped
def tune(
    called: typer.Context,
    train: Annotated[
        bool,
        _training(
            "--train",
            help="Train EESD's exit layer and its predictor (with --exit-layer: only that); with -m sd the draft, "
            "with -m medusa, eagle or glide a head.",
        ),
    ] = False,
    *,
    tuning: TuneOptions,
    sampling: TuneSampling,
    training: TrainingOptions,
    models: ModelOptions,
    display: options.OutputOptions,
) -> int | None:
    """Find the fastest method and its settings for a pair on this machine. With --train: train what drafts for a target."""
    begin = time.perf_counter()
    from specgen.cli import tune_run
    from specgen.view import theme

    err = theme.console(stderr=True, no_color=display.no_color)
    _check_given(called, train=train)
    if train:
        if launch() is not None:
            raise SpecgenError("under torchrun nothing is trained", "Train in one process: specgen tune --train")
        if models.head is not None:
            hint = "Leave it out: it names a trained head. An exit layer's LM head is --exit-head own|target"
            raise SpecgenError("--head cannot be combined with --train", hint)
        if models.draft_dtype is not None:
            raise SpecgenError("--draft-dtype cannot be combined with --train", "Leave it out: training needs whole weights")
        task = TrainRequest(
            methods=tuning.methods,
            prompts=tuning.prompts,
            out=tuning.out,
            seed=sampling.seed or 0,
            chat=tuning.chat,
            exit_layer=models.exit_layer,
            **asdict(training),
        )
        return run_training(models, task, err, quiet=display.quiet, as_json=display.json)
    request = tune_run.TuneRequest(begin, sampling=sampling.params(), **asdict(tuning))
    tune_run.tune_pair(models, request, err, quiet=display.quiet, as_json=display.json)
    return None


def _check_given(called: typer.Context, *, train: bool) -> None:
    """Raises SpecgenError for the options on the command line that belong to training but `train` is False, or the reverse."""
    of_training = {field.name for field in fields(TrainingOptions)}
    of_tuning = {field.name for group in (TuneOptions, TuneSampling) for field in fields(group)} - _ALSO_FOR_TRAINING
    wrong = [
        max(option.opts, key=len)
        for option in called.command.params
        if option.name in (of_tuning if train else of_training)
        and getattr(called.get_parameter_source(option.name), "name", "") == "COMMANDLINE"
    ]
    if wrong:
        named = ", ".join(wrong)
        problem = f"{named} cannot be combined with --train" if train else f"{named} needs --train"
        raise SpecgenError(problem, "Tune and train in turn: specgen tune --train, then specgen tune")
