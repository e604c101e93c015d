"""What a training run uses besides its models: the recipe, the text, the output folder, and what
shows its progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.files import write_whole
from specgen.base.machine import versions
from specgen.base.schema import parse_json, read_text
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.weights import weights_fingerprint
from specgen.train.corpus import Corpus


class TrainingStopped(Exception):  # noqa: N818  a stop on request is not an error
    """A stop was requested. Calling the interrupted function again resumes the training."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters and budget of a training run. They are stored in the description of what was
    trained.

    The budget is a number of optimizer `steps`, or `seconds`; training only an acceptance predictor
    needs neither. A step uses `batch` sequences of `window` tokens (None, with a budget in seconds:
    their number is chosen by timing). `self_text` is the share of the
    sequences that hold text which the target generated or, in distillation, text with the target's
    predictions; the others hold corpus text. The default learning rate and batch size are those of
    EESD, Appendix C.
    """

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    batch: int | None = 64
    window: int = 2048
    self_text: float = 0.5
    seed: int = 0


@dataclass(slots=True)
class TrainingTask:
    """What a training run uses besides its models.

    The target generates training text by continuing `prompts`, or, if there are none, the
    beginnings of documents in `corpus`. `out` is the output folder; unfinished work is kept in its
    subfolder `training`. `kept_text` is the folder where generated text is kept for further
    trainings of the same target; None: it is unfinished work too. `announce` is called with a line
    of text, `show` with a stage of the work, its share that is done (0 to 1) and its figures as
    text. The training stops when `stop_requested` returns True. `began` is when the work began, by
    `time.monotonic`: a budget in seconds pays for loading the models too, and for the `afterwards`
    seconds that what follows the training takes.
    """

    out: Path
    recipe: Recipe
    corpus: Corpus | None = None
    prompts: Corpus | None = None
    kept_text: Path | None = None
    announce: Callable[[str], None] = lambda _: None
    show: Callable[[str, float, str], None] = lambda *_: None
    stop_requested: Callable[[], bool] = lambda: False
    began: float = field(default_factory=time.monotonic)
    afterwards: float = 0.0

    @property
    def folder(self) -> Path:
        """The folder of unfinished work."""
        return self.out / "training"

    @property
    def seconds_left(self) -> float:
        """What is left of a budget in seconds for the training itself; infinite without one."""
        if self.recipe.seconds is None:
            return math.inf
        return self.began + self.recipe.seconds - self.afterwards - time.monotonic()

    def stop_if_requested(self) -> None:
        """Raises TrainingStopped if a stop is requested."""
        if self.stop_requested():
            raise TrainingStopped

    def begin(self, target: LoadedModel, settings: dict[str, Any]) -> None:
        """Stores the settings of the run in its folder. Raises SpecgenError if the folder has
        unfinished work of a run with other settings."""
        path = self.folder / "settings.json"
        now = {**asdict(self.recipe), **settings, "dtype": target.dtype_name}
        now["corpus"], now["prompts"] = (
            text and text.digest() for text in (self.corpus, self.prompts)
        )
        now["the target model"] = weights_fingerprint(target.folder)
        hint = f"Give the same options, or delete {self.folder} to start again"
        if not path.exists():
            write_whole(path, json.dumps(now))
            return
        before = dict(parse_json(read_text(path, "settings"), f"the settings {path}", hint))
        changed = [
            f"{name}: {before.get(name)}, now {value}"
            for name, value in now.items()
            if before.get(name) != value
        ]
        if changed:
            raise SpecgenError(f"{self.folder} belongs to another run ({'; '.join(changed)})", hint)

    def made_with(self) -> dict[str, Any]:
        """Returns one mapping, which is stored with the result: the recipe's fields, the library
        versions, and under `command` the command line, if it is that of `specgen tune`."""
        command = (
            {"command": "specgen " + " ".join(sys.argv[1:])} if sys.argv[1:2] == ["tune"] else {}
        )
        return {**command, **asdict(self.recipe), **versions()}
