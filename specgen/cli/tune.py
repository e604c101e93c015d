"""`specgen tune`: find the fastest method and settings for a pair, or train an exit layer or a draft model with `--train`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.cli.train_run import DEFAULT_MINUTES
from specgen.errors import SpecgenError
from specgen.types import SamplingParams


def _training(metavar: str | None, help: str, *names: str) -> Any:
    """An option in the help panel of training."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Training")


Train = Annotated[bool, _training(None, "Train EESD's exit layer and its predictor, or with -m sd the draft.", "--train")]
Methods = Annotated[
    str | None, typer.Option("--methods", "-m", metavar="LIST", help="Only these, separated by commas; with --train: eesd or sd.")
]
Budget = Annotated[float, typer.Option(metavar="SECONDS", help="Time for everything, loading included.")]
Limit = Annotated[int, typer.Option(metavar="N", help="Number of prompts, taken from each category in turn.")]
ExportTo = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="ENGINE",
        help="Print the tuned settings for transformers, vllm, sglang, llama.cpp or mlx; an existing profile is used as it is.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The profile's folder; by default one for this pair in your data folder."),
]
Minutes = Annotated[float | None, _training("M", f"Total training time ({DEFAULT_MINUTES:g}).")]
Steps = Annotated[int | None, _training("S", "Optimizer steps instead of minutes: reproducible weights.")]
Corpus = Annotated[Path | None, _training("FILE", "Training text: plain, or JSON lines with text; demo: the bundled pair's own.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts to tune on, as compare reads them (default: examples.yaml); with --train: those that the target continues.",
    ),
]
Layer = Annotated[int | None, _training("N", "Put the exit after layer N (7 % of the layers).", "--layer")]
ExitLayers = Annotated[int, _training("0|1|2", "Layers in the exit; 0: only a head.", "--exit-layers")]
Head = Annotated[str, _training("own|target", "Train a head, or use the target's.", "--head")]
SelfText = Annotated[
    float | None,
    _training("SHARE", "Share of sequences that the target generates (0.5; for sd: that it labels, 1).", "--self-text"),
]
Batch = Annotated[int | None, _training("B", "Sequences per step (64; on a CPU 16).", "--batch-size")]
Window = Annotated[int | None, _training("W", "Tokens per sequence (2048; on a CPU 256).", "--window")]
LearningRate = Annotated[
    float | None, _training("R", "Peak learning rate (0.001; for sd 0.0003); it decays to a tenth.", "--learning-rate")
]


@reported
def tune(
    train: Train = False,
    method_names: Methods = None,
    budget: Budget = 60.0,
    prompts: Prompts = None,
    category: options.Category = None,
    limit: Limit = 8,
    chat: options.CompareChat = False,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    ignore_eos: options.IgnoreEos = False,
    export: ExportTo = None,
    out: Out = None,
    minutes: Minutes = None,
    steps: Steps = None,
    corpus: Corpus = None,
    layer: Layer = None,
    exit_layers: ExitLayers = 1,
    head: Head = "own",
    self_text: SelfText = None,
    batch_size: Batch = None,
    window: Window = None,
    learning_rate: LearningRate = None,
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "auto",
    draft_device: options.DraftDevice = None,
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    offline: options.Offline = False,
    exit_layer: options.ExitLayer = None,
    seed: options.Seed = 0,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int | None:
    """Find the fastest method and its settings for a pair on this machine. With --train: train EESD's exit layer or the draft."""
    begin = time.perf_counter()
    from specgen.cli import train_run, tune_run
    from specgen.cli.model_options import ModelOptions
    from specgen.ui import theme

    err = theme.console(stderr=True, no_color=no_color)
    models = ModelOptions(
        target, draft, device, draft_device, dtype, revision, draft_revision, trust_remote_code, offline, exit_layer
    )
    _check(train, export, (minutes, steps, corpus, layer))
    if train:
        training = train_run.TrainRequest(
            method_names, head, minutes=minutes, steps=steps, corpus=corpus, prompts=prompts, layer=layer, seed=seed or 0,
            exit_layers=exit_layers, self_text=self_text, batch=batch_size, training_length=window,
            learning_rate=learning_rate, out=out,
        )  # fmt: skip
        return train_run.train(models, training, err, quiet=quiet, as_json=json)
    sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed, (), ignore_eos)
    request = tune_run.TuneRequest(begin, budget, method_names, prompts, category, limit, chat, sampling, export, out)
    return tune_run.tune_pair(models, request, err, quiet=quiet, as_json=json)


def _check(train: bool, export: object, training_options: tuple[object, ...]) -> None:
    """Refuse options of tuning with --train, and options of training without it."""
    hint = "Tune and train in turn: specgen tune --train, then specgen tune"
    if train and export is not None:
        raise SpecgenError("--export cannot be combined with --train", hint)
    if not train and any(option is not None for option in training_options):
        raise SpecgenError("--minutes, --steps, --corpus or --layer needs --train", hint)
