"""What the training tests share: a tiny recipe, models on a CPU, one way to train each kind, an
observer, and the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from click.testing import Result
from typer.testing import CliRunner

from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.cli.trainable import TRAINABLE
from specgen.engine.draft_model import DraftModel
from specgen.engine.loaded_model import LoadedModel, load_model
from specgen.engine.model_files import ModelSource, find_model
from specgen.engine.precision import Precision
from specgen.train.corpus import Corpus, Use, read_corpus
from specgen.train.loop import IGNORED, PackedBatch, Taught, pack
from specgen.train.task import Recipe, TrainingTask
from specgen.train.texts import Text, continuations

TINY = Recipe(steps=6, batch=4, window=24)
TEXTS = [[5, 9, 7, 3, 11, 30, 31], [4, 8], [32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


class Recorder:
    """Records what a training shows, and requests a stop once it has shown the stage `stage`
    `stop_after` times (0: never)."""

    def __init__(self, stage: str = "", stop_after: int = 0) -> None:
        self._stage = stage
        self._stop_after = stop_after
        self.shown: dict[str, list[str]] = {"Generating text": [], "Training": []}
        self.messages: list[str] = []

    def show(self, stage: str, share: float, figures: str) -> None:
        assert 0 <= share <= 1
        self.shown[stage].append(figures)

    def stop_requested(self) -> bool:
        return len(self.shown.get(self._stage, [])) == self._stop_after > 0


def task_of(
    out: Path, recipe: Recipe = TINY, recorder: Recorder | None = None, **texts: Any
) -> TrainingTask:
    seen = recorder or Recorder()
    callbacks: dict[str, Callable[..., Any]] = {"announce": seen.messages.append}
    return TrainingTask(
        out, recipe, show=seen.show, stop_requested=seen.stop_requested, **callbacks, **texts
    )


def opened(folder: Path | str, backend: str = "auto") -> LoadedModel:
    files = find_model(ModelSource(str(folder), backend=backend), lambda _: None)
    return load_model(files, Precision(torch.float32), [torch.device("cpu")], lambda _: None)


def opened_draft(folder: Path | str) -> DraftModel:
    """A draft model with the target's tokens."""
    files = find_model(ModelSource(str(folder)), lambda _: None)
    return DraftModel(files, Precision(torch.float32), torch.device("cpu"))


def objective(kind: str, task: TrainingTask, target: LoadedModel, *arguments: Any) -> Any:
    """The objective of `specgen tune --train --methods KIND`. `arguments` are further ones of its
    constructor."""
    module, name = TRAINABLE[kind].objective.split(".")
    return getattr(import_module(f"specgen.train.{module}"), name)(task, target, *arguments)


def written(
    target: LoadedModel, prompts: Sequence[Sequence[int]], length: int, *, greedy: bool, part: Use
) -> list[Text]:
    """Texts of at most `length` tokens that the target generates after the prompts, to be used for
    `part`."""
    sampling = SamplingParams(temperature=0 if greedy else 1)
    texts = continuations(target, prompts, length, sampling=sampling, seed=1)
    return [
        Text(text, len(prompt), greedy, part) for prompt, text in zip(prompts, texts, strict=True)
    ]


def corpus_of(path: Path, target: LoadedModel) -> Corpus:
    return read_corpus(path, target.tokenizer.encode)


def packed(texts: Sequence[Sequence[int]], length: int) -> PackedBatch:
    """A batch of one sequence of `length` tokens that holds these texts."""
    waiting = iter(texts)

    def sample(rng: Random, max_tokens: int) -> Taught:
        text = list(next(waiting)[:max_tokens])
        return Taught(text, [IGNORED] * len(text))

    return pack([sample], length, Random(0))


def train_command(method: str, corpus: Path, out: Path | None, *more: str) -> list[str]:
    """The arguments of `specgen tune --train` with tiny batches; without `out`, no output folder is
    named."""
    named = ["--corpus", str(corpus), *(["--out", str(out)] if out is not None else [])]
    sizes = ["--window", "24", "--batch-size", "4", "--device", "cpu", "--dtype", "float32"]
    return ["tune", "--train", "--methods", method, *named, *sizes, *more]


def invoke(arguments: list[str]) -> Result:
    return CliRunner().invoke(app, arguments)


def refused(arguments: list[str]) -> str:
    """Runs the command, which has to refuse its options with exit code 2 and one line on stderr.
    Returns this line."""
    result = invoke(arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def trained(arguments: list[str], code: int = 0) -> Result:
    result = invoke(arguments)
    assert result.exit_code == code, result.stderr
    return result
