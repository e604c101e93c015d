"""What to train and for how long: the recipe, the task, and the observer of its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specgen.base.errors import SpecgenError
from specgen.base.machine import versions
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import Corpus

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_RESERVED_SHARE = 0.05  # of a budget in seconds, for loading, evaluation and the predictor


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters and budget of a training run. Files of what is trained store these fields.

    The budget is a number of optimizer `steps`, or `seconds`; a predictor alone needs neither. A step uses `batch` sequences of
    `window` tokens. `self_text` is the share of the sequences that hold text of the target's own, or text that it labelled; the
    others hold corpus text. The default learning rate and batch size are those of EESD, Appendix C.
    """

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    batch: int = 64
    window: int = 2048
    self_text: float = 0.5
    seed: int = 0

    def after(self, seconds: float) -> Recipe:
        """Returns a copy whose time budget is what is left for optimization after so many seconds of other work."""
        if self.seconds is None:
            return self
        return replace(self, seconds=max(1.0, self.seconds * (1 - _RESERVED_SHARE) - seconds))


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What a training run uses besides its models.

    The target generates training text by continuing `prompts` (token ids), or, if there are none, the beginnings of documents in
    `corpus`. `out` is the output folder; unfinished work is kept in its subfolder `training`. `command` is the user's command
    line, which is stored with the result. `clock` returns the time in seconds.
    """

    out: Path
    recipe: Recipe
    corpus: Corpus | None = None
    prompts: Sequence[Sequence[int]] = ()
    command: str = ""
    clock: Callable[[], float] = time.monotonic

    @property
    def folder(self) -> Path:
        """The folder of unfinished work."""
        return self.out / "training"

    def settings(self, target: LoadedModel) -> dict[str, Any]:
        """Returns the settings that must be the same when an interrupted training is resumed, by the names of their options.

        Hashes are in a list, so that messages do not print them.
        """
        recipe = self.recipe
        return {
            "--steps": recipe.steps,
            "--minutes": None if recipe.seconds is None else recipe.seconds / 60,
            "--learning-rate": recipe.learning_rate,
            "--batch-size": recipe.batch,
            "--window": recipe.window,
            "--self-text": recipe.self_text,
            "--seed": recipe.seed,
            "--dtype": target.dtype_name,
            "--corpus": None if self.corpus is None else [self.corpus.digest()],
            "--prompts": [Corpus(self.prompts).digest()] if self.prompts else None,
            "the target model": [weights_fingerprint(target.folder)],
        }

    def made_with(self) -> dict[str, Any]:
        """Returns the command line, the recipe and the library versions, which are stored with the result."""
        return {**({"command": self.command} if self.command else {}), **asdict(self.recipe), **versions()}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training run.

    `step` and `tokens` count the training so far. `share` is the used part of the budget, from 0 to 1. `loss` is the mean over
    the last steps in nats per token. `greedy_agreement` is the share of tokens for which the trained part and the target have
    the same most probable token. It is measured in the last steps where the target's predictions are known; None if there
    are no such tokens. `seconds` is the training time.
    """

    step: int
    tokens: int
    share: float
    loss: float
    greedy_agreement: float | None
    seconds: float

    def figures(self, generation_seconds: float) -> dict[str, Any]:
        """Returns the measurements to store with the result. `generation_seconds` is the time that text generation took."""
        minutes = {"writing": generation_seconds / 60, "training": self.seconds / 60}
        return {"steps": self.step, "tokens": self.tokens, "loss": self.loss, "minutes": minutes}


class TrainingObserver(Protocol):
    """Receives progress reports, and can request a stop."""

    def announce(self, message: str) -> None: ...

    def generating(self, batches: int, share: float, tokens: int) -> None:
        """Reports text generation: `batches` batches with `tokens` tokens in all are done, a `share` (0 to 1) of the work."""

    def training(self, progress: TrainingProgress) -> None: ...

    def stop_requested(self) -> bool: ...


class TrainingStopped(Exception):  # noqa: N818  a stop on request is not an error
    """The observer requested a stop. Calling the interrupted function again resumes the training."""


def stop_if_requested(observer: TrainingObserver) -> None:
    """Raises TrainingStopped if the observer requests a stop."""
    if observer.stop_requested():
        raise TrainingStopped


def check_same_run(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raises SpecgenError if `before`, the settings stored in the file `path`, differ from the current `settings`."""

    def shown(value: Any) -> str:
        number = f"{value:g}" if isinstance(value, float) else str(value)
        return "not given" if value is None else "given" if isinstance(value, list) else number

    changed = []
    for name, now in settings.items():
        if (old := before.get(name)) != now:
            both = isinstance(old, list) and isinstance(now, list)
            changed.append(f"{name} changed" if both else f"{name}: {shown(old)}, now {shown(now)}")
    if changed:
        hint = f"Give the same options, or delete {path.parent} to start again"
        raise SpecgenError(f"{path} belongs to another run ({'; '.join(changed)})", hint)
