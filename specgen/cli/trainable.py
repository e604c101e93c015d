"""What `specgen tune --train` can train, and with which options. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.cli.options import ModelGroup, TrainingOptions, TuneOptions

DEFAULT_MINUTES = 10.0
_EXIT_OPTIONS = {"layer": "--layer", "exit_layers": "--exit-layers", "exit_head": "--exit-head"}
_LOOP_OPTIONS = {
    "steps": "--steps",
    "self_text": "--self-text",
    "batch": "--batch-size",
    "learning_rate": "--learning-rate",
}
_OPTIONS = _EXIT_OPTIONS | _LOOP_OPTIONS


@dataclass(frozen=True, slots=True)
class Trainable:
    """What can be trained. `name` is its kind with an article, `method` the value of --methods that
    trains it, `objective` its module and class in `specgen.train`. `learning_rate` and `self_text`
    are the defaults of these options.
    """

    name: str
    method: str
    objective: str
    learning_rate: float = 1e-3
    self_text: float = 0.5


EXIT = Trainable("an exit layer", "eesd", "exits.ExitObjective")
# of the exit layer that --exit-layer names
PREDICTOR = Trainable("a predictor", "eesd", "exits.PredictorObjective")
# by default it learns from the target's own text only
DRAFT = Trainable("a draft model", "sd", "distillation.DraftObjective", 3e-4, 1.0)
MEDUSA = Trainable("Medusa heads", "medusa", "blocks.MedusaObjective", 3e-3)
EAGLE = Trainable("an EAGLE head", "eagle", "heads.EagleObjective")
GLIDE = Trainable("a GliDe head", "glide", "heads.GlideObjective")
BLOCK = Trainable("a DSpark head", "block", "blocks.BlockObjective", 1e-2)
TRAINABLE = {part.method: part for part in (EXIT, DRAFT, MEDUSA, EAGLE, GLIDE, BLOCK)}


class Asked(NamedTuple):
    """What the user asked for: the options, and in `part` what is to be trained."""

    models: ModelGroup
    tuning: TuneOptions
    training: TrainingOptions
    seed: int
    part: Trainable

    @property
    def has_no_text(self) -> bool:
        """Whether the user named no text for a model that has none of its own: the target then
        answers the bundled prompts."""
        is_named = self.tuning.prompts is not None or self.training.corpus is not None
        has_own = self.models.target is None and not self.tuning.chat
        return not is_named and not has_own


def part_of(tuning: TuneOptions, models: ModelGroup) -> Trainable:
    """Returns what the options ask to train. Raises SpecgenError if --methods names a method that
    has nothing to train, or methods for which different things would be trained."""
    named = {name.strip() for name in (tuning.methods or "eesd").split(",")}
    names = {"eesd" if name.startswith("eesd") else name for name in named}
    for name in sorted(names - TRAINABLE.keys()):
        methods.named(name)  # an unknown name gets its own message
        trainable = ", ".join(f"{part.name} ({part.method})" for part in TRAINABLE.values())
        raise SpecgenError(
            f"{name} has nothing to train", f"Name with --methods what to train: {trainable}"
        )
    if len(names) > 1:
        raise SpecgenError(
            f"{' and '.join(sorted(names))} cannot be trained in one run", "Give one of them"
        )
    if names == {"eesd"} and models.exit_layer is not None:
        return PREDICTOR
    return TRAINABLE[names.pop()]


def check(asked: Asked) -> None:
    """Raises SpecgenError for options that are wrong for any model, and for those that do not apply
    to what is trained."""
    models, tuning, training, _, part = asked
    _check_that_all_apply(asked)
    _check_values(asked)
    if training.minutes is not None and training.steps is not None:
        raise SpecgenError("both --minutes and --steps are given", "Give one of them")
    if tuning.chat and training.self_text is not None:
        raise SpecgenError(
            "--self-text cannot be combined with --chat: the target then generates all text",
            "Leave it out",
        )
    if training.self_text == 0 and training.corpus is None and models.target is not None:
        hint = "Give --corpus FILE (plain text or JSON lines), or leave --self-text above 0"
        raise SpecgenError("there is no text to train on", hint)
    has_both = tuning.prompts is not None and training.corpus is not None
    if part is DRAFT and not tuning.chat and has_both and training.self_text in (None, 1):
        raise SpecgenError(
            f"--corpus {training.corpus} would not be used: with --prompts a draft learns "
            "from the target's continuations only",
            "Leave it out, or mix it in: --self-text 0.5",
        )
    if part is DRAFT and not models.has_draft:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")


def _check_that_all_apply(asked: Asked) -> None:
    """Raises SpecgenError if an option is given that does not apply to what is trained."""
    training = asked.training
    part = asked.part
    unused = [] if part is EXIT else [*_EXIT_OPTIONS]
    if part is PREDICTOR:
        unused += _LOOP_OPTIONS
    wrong = []
    for name in unused:
        if getattr(training, name) != getattr(TrainingOptions, name):
            wrong.append(_OPTIONS[name])
    if asked.models.exit_layer is not None and part is not PREDICTOR:
        wrong.append("--exit-layer")
    if wrong:
        with_option = "--exit-layer" if part is PREDICTOR else f"--methods {part.method}"
        problem = (
            f"{', '.join(wrong)} cannot be combined with --train {with_option}, "
            f"which trains {part.name}"
        )
        raise SpecgenError(problem, "Leave out what does not apply")


def _check_values(asked: Asked) -> None:
    """Raises SpecgenError for a value that is out of range."""
    training = asked.training
    tiny = sys.float_info.min
    huge = sys.float_info.max
    least_share = tiny if asked.part is DRAFT else 0
    rules = (
        ("--minutes", training.minutes, tiny, huge, "above 0"),
        ("--steps", training.steps, 1, huge, "above 0"),
        ("--batch-size", training.batch, 1, huge, "above 0"),
        ("--learning-rate", training.learning_rate, tiny, huge, "above 0"),
        ("--window", training.training_length, 8, huge, "at least 8 tokens"),
        ("--self-text", training.self_text, least_share, 1, "from 0 to 1, for sd above 0"),
        ("--seed", asked.seed, 0, 2**31 - 1, "a whole number from 0 to 2^31 - 1"),
    )
    for option, value, least, most, rule in rules:
        if value is not None and not least <= value <= most:
            raise SpecgenError(f"{option} is {value}", f"It has to be {rule}")
    if training.exit_head not in ("own", "target"):
        hint = "Take own (a trained copy) or target (the target's head, unchanged)"
        raise SpecgenError(f"--exit-head is {training.exit_head!r}", hint)


def first_share(agreement: float | Sequence[float]) -> float:
    return agreement if isinstance(agreement, float) else agreement[0]
