"""What `specgen tune --train` can train, and the options that say what and how."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from specgen import methods
from specgen.base.errors import SpecgenError

DEFAULT_MINUTES = 10.0
_EXIT_OPTIONS = ("--layer", "--exit-layers", "--exit-head")


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """A part that can be trained. `name` is its kind with an article; `method` is the value of `--methods` that trains it.

    The options `refused` do not apply to it. `learning_rate` and `self_text` are the defaults of these options. `needs_own_text`:
    it learns from the target's predictions only, so `self_text` is above 0. `is_head`: it drafts from the target's own states.
    """

    name: str
    method: str
    refused: tuple[str, ...] = ()
    learning_rate: float = 1e-3
    self_text: float = 0.5
    needs_own_text: bool = False

    @property
    def is_head(self) -> bool:
        return self.method in ("medusa", "eagle", "glide")


def _head(method: str, name: str, learning_rate: float = 1e-3) -> TrainedPart:
    return TrainedPart(name, method, (*_EXIT_OPTIONS, "--exit-layer"), learning_rate)


EXIT = TrainedPart("an exit layer", "eesd")
PREDICTOR = TrainedPart(
    "a predictor", "eesd", (*_EXIT_OPTIONS, "--steps", "--self-text", "--batch-size", "--learning-rate")
)  # for the exit layer that --exit-layer names
DRAFT = TrainedPart("a draft model", "sd", (*_EXIT_OPTIONS, "--exit-layer"), 3e-4, 1.0, needs_own_text=True)
_HEADS = _head("medusa", "Medusa heads", 3e-3), _head("eagle", "an EAGLE head"), _head("glide", "a GliDe head")
PARTS: Mapping[str, TrainedPart] = MappingProxyType({part.method: part for part in (EXIT, DRAFT, *_HEADS)})


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
        part = self.part
        self._check_options_of(part)
        if self.exit_head not in ("own", "target"):
            hint = "Take own (a trained copy) or target (the target's head, unchanged)"
            raise SpecgenError(f"--exit-head is {self.exit_head!r}", hint)
        if self.minutes is not None and self.steps is not None:
            raise SpecgenError("both --minutes and --steps are given", "Give one of them")
        tiny, huge = sys.float_info.min, sys.float_info.max
        shares = (tiny, "above 0 to 1") if part.needs_own_text else (0, "from 0 to 1")
        rules = (
            ("--minutes", self.minutes, tiny, huge, "above 0"),
            ("--steps", self.steps, 1, huge, "above 0"),
            ("--layer", self.layer, 1, huge, "above 0"),
            ("--batch-size", self.batch, 1, huge, "above 0"),
            ("--learning-rate", self.learning_rate, tiny, huge, "above 0"),
            ("--window", self.training_length, 8, huge, "at least 8 tokens"),
            ("--exit-layers", self.exit_layers, 0, 2, "0 (a head alone), 1 or 2"),
            ("--self-text", self.self_text, shares[0], 1, shares[1]),
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

    def _check_options_of(self, part: TrainedPart) -> None:
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
    def part(self) -> TrainedPart:
        """What is trained. Raises SpecgenError if `methods` names a method that has nothing to train, or several parts."""
        names = {name.strip() for name in ("eesd" if self.methods is None else self.methods).split(",")}
        found = set()
        for name in sorted(names):
            found.add("eesd" if name.startswith("eesd") else name)
            if name not in PARTS and not name.startswith("eesd"):
                methods.find(name)  # an unknown name gets its own message
                known = ", ".join(f"{part.name} ({part.method})" for part in PARTS.values())
                raise SpecgenError(f"{name} has nothing to train", f"Name with --methods what to train: {known}")
        if len(found) > 1:
            raise SpecgenError(f"{' and '.join(sorted(found))} cannot be trained in one run", "Give one of them")
        (method,) = found
        return PREDICTOR if method == "eesd" and self.exit_layer is not None else PARTS[method]
