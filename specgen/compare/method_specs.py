"""Parses the methods that `specgen compare` gets on the command line, such as `svip`, `sd:policy=svip:threshold=0.3` or
`selfsd:skip=3+5+7`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.compare.baselines import BASELINES, baseline_settings
from specgen.methods import Choice

REFERENCE = "ar"  # plain decoding, which all other methods are compared with
EVERY = "all"
_PATHS = "The path after exit= cannot hold a comma or a colon here: give a link without them, or use --exit-layer FILE"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method and its settings as given on the command line. `written` is the original text, which identifies the method in
    results. `settings` contains only what the user wrote, without defaults. `choice` has them all; None for transformers' own
    methods. `tuned_on` are the fingerprints of the prompts on which `specgen tune` chose these settings; None if the settings are
    not from a profile."""

    written: str
    name: str
    settings: Mapping[str, Any]
    lossless: bool
    choice: Choice | None = None
    tuned_on: frozenset[str] | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether the method is one of transformers' own (`transformers`, `transformers-assisted`)."""
        return self.name in BASELINES

    @property
    def needs_draft_model(self) -> bool:
        return self.name == "transformers-assisted" if self.choice is None else self.choice.method.needs_draft_model

    @property
    def is_parallel(self) -> bool:
        """Whether the draft model runs at the same time as the target. It then runs in a process of its own, which takes a while
        to start."""
        return self.choice is not None and self.choice.method.is_parallel

    @property
    def drafts_text(self) -> bool:
        """Whether the draft model drafts in its own tokens, which become the target's by way of their text."""
        return self.choice is not None and self.choice.settings.drafts_text

    @property
    def translates_tokens(self) -> bool:
        """Whether a draft model drafts the target's tokens for it: those of another tokenizer have to be translated."""
        return self.choice is not None and self.choice.method.uses_draft_model and not self.drafts_text

    @property
    def decoding_key(self) -> tuple[object, ...]:
        """What identifies how the method decodes: two methods with equal keys differ only in how they are written, such as `sd`
        and `sd:k=5`."""
        if self.choice is None:
            return self.name, baseline_settings(self.name, self.settings)
        method, settings = self.choice.method, self.choice.settings
        return method.needs, method.drafter, method.verifier, method.schedule, settings.policy, settings.values

    @property
    def drafts_chains(self) -> bool:
        """Whether it is specgen's own method and no draft of it is a tree: what `--exact` covers."""
        return self.choice is not None and not self.choice.method.drafts_trees(self.choice.settings)


def parse_spec(written: str) -> MethodSpec:
    """Parses one method with its settings. Raises SpecgenError for an unknown name (the message suggests the most similar one)
    and for settings that the method does not have."""
    written = written.strip()
    try:
        name, settings = methods.split(written)
    except SpecgenError as error:
        raise (SpecgenError(error.message, _PATHS) if ":exit=" in written else error) from None
    if name in BASELINES:
        baseline_settings(name, settings)
        return MethodSpec(written, name, settings, lossless=True)
    if name not in methods.METHODS:
        known = [*methods.METHODS, *BASELINES]
        raise SpecgenError(
            f"there is no method {name!r}{nearest(name, known)}",
            f"All of them: {methods.ALL_METHODS}; from transformers: {', '.join(BASELINES)}",
        )
    choice = methods.choose(name, settings)
    if choice.settings.values.get("history"):
        raise SpecgenError(f"{written} would copy its own earlier outputs", "Leave history out in compare")
    return MethodSpec(written, name, settings, choice.method.lossless, choice)


def parse_specs(texts: Sequence[str]) -> list[MethodSpec]:
    """Parses comma-separated lists of methods. `all` means every specgen method but yardsticks. Plain decoding always
    comes first; a method that is given twice is kept once."""
    written = [part.strip() for text in texts for part in text.split(",")]
    if not all(written):
        raise SpecgenError(f"--methods is {','.join(texts)!r}: a name is missing", "Write it like --methods svip,sd:k=8,lookup")
    for before, part in pairwise(written):
        if ":exit=" in before and part.split(":")[0] not in {*methods.METHODS, *BASELINES, EVERY}:
            raise SpecgenError(f"cannot read {part!r} after {before!r}", _PATHS)
    every = [method.name for method in methods.METHODS.values() if not method.is_yardstick]
    names = [name for part in written for name in (every if part == EVERY else [part])]
    return [parse_spec(name) for name in dict.fromkeys([REFERENCE, *names])]
