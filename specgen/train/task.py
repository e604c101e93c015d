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
_STORED_NAMES = {"batch_size": "batch", "training_length": "window", "generated_share": "self_text"}
_OPTIONS = {  # stored settings under the names that users give them
    **{name: f"--{name}" for name in ("steps", "window", "seed", "dtype", "corpus", "prompts")},
    "learning_rate": "--learning-rate",
    "self_text": "--self-text",
    "batch": "--batch-size",
    "seconds": "--minutes",
    "after": "--layer",
    "layers": "--exit-layers",
    "own_head": "--exit-head",
    "fingerprint": "the target model",
    "draft": "the draft model",
    "exit": "the exit layer",
    "kind": "--methods",
}
_DIGESTS = ("corpus", "prompts", "fingerprint", "draft", "exit")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters and budget of a training run.

    The budget is a number of optimizer `steps`, or `seconds`; a predictor alone needs neither. A step uses `batch_size` sequences
    of `training_length` tokens.
    `generated_share` is the share of the sequences that hold GeneratedText; the others hold corpus text without the target's
    predictions. The default learning rate and batch size are those of EESD, Appendix C.
    """

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    batch_size: int = 64
    training_length: int = 2048
    generated_share: float = 0.5
    seed: int = 0

    def after_generation(self, seconds: float) -> Recipe:
        """Returns a copy whose time budget is what is left for optimization after text generation took `seconds`."""
        if self.seconds is None:
            return self
        return replace(self, seconds=max(1.0, self.seconds * (1 - _RESERVED_SHARE) - seconds))

    def stored(self) -> dict[str, Any]:
        """Returns the fields as a dictionary, under the names that stored files use for them."""
        return {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}


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
        """Returns the settings that must be the same when an interrupted training is resumed."""
        return {
            **self.recipe.stored(),
            "fingerprint": weights_fingerprint(target.folder),
            "dtype": target.dtype_name,
            "corpus": None if self.corpus is None else self.corpus.digest(),
            "prompts": Corpus(self.prompts).digest() if self.prompts else None,
        }

    def made_with(self) -> dict[str, Any]:
        """Returns the command line, the recipe and the library versions, which are stored with the result."""
        return {**({"command": self.command} if self.command else {}), **self.recipe.stored(), **versions()}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training run.

    `step` and `tokens` count the training so far. `share` is the used part of the budget, from 0 to 1. `loss` is the mean over
    the last steps in nats per token. `greedy_agreement` is the share of tokens for which the trained draft and the target have
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


def check_same_run(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raises SpecgenError if `before`, the settings stored in the file `path`, differ from the current `settings`."""
    changed = [_change(name, before.get(name), settings[name]) for name in settings if before.get(name) != settings[name]]
    if changed:
        hint = f"Give the same options, or delete {path.parent} to start again"
        raise SpecgenError(f"{path} belongs to another run ({'; '.join(changed)})", hint)


def _change(name: str, before: Any, now: Any) -> str:
    """Returns in words how the setting `name` changed, under its name as an option. Digests are not printed."""
    if name in _DIGESTS and None not in (before, now):
        return f"{_OPTIONS[name]} changed"

    def shown(value: Any) -> str:
        if value is None:
            return "not given"
        if name in _DIGESTS:
            return "given"
        if name == "own_head":
            return "own" if value else "target"
        number = value / 60 if name == "seconds" and isinstance(value, int | float) else value
        return f"{number:g}" if isinstance(number, float) else str(number)

    return f"{_OPTIONS.get(name, name)}: {shown(before)}, now {shown(now)}"
