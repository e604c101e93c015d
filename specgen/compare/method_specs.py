"""Parses the methods that `specgen compare` gets on the command line, such as `svip`,
`sd:policy=svip:threshold=0.3` or `selfsd:skip=3+5+7`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.base.settings import Value
from specgen.compare.baselines import BASELINES
from specgen.methods import METHODS, Choice

REFERENCE = "ar"  # plain decoding, which all other methods are compared with
EVERY = "all"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method and its settings. `written` is the text on the command line, which identifies the
    method in results. `tuned_on` are the fingerprints of the prompts on which `specgen tune` chose
    these settings; None if they are not from a profile."""

    written: str
    choice: Choice
    tuned_on: frozenset[str] | None = None

    @property
    def name(self) -> str:
        return self.choice.method.name

    @property
    def lossless(self) -> bool:
        return self.choice.method.lossless

    @property
    def is_baseline(self) -> bool:
        """Whether the method is one of transformers' own."""
        return self.name in BASELINES

    @property
    def resolved(self) -> dict[str, Value]:
        """All settings with which the method runs, defaults included; with `policy` where it has a
        choice of policies."""
        return self.choice.method.as_dict(self.choice.settings)

    @property
    def drafts_chains(self) -> bool:
        """Whether the method is specgen's own and all its drafts are chains. Then `--exact` makes
        its logits bit-equal to plain decoding's without our own kernels, too."""
        return not self.is_baseline and not self.choice.method.drafts_trees(self.choice.settings)


def parse_spec(written: str) -> MethodSpec:
    """Parses one method with its settings.

    Raises SpecgenError for an unknown method, a setting that is not written NAME=VALUE or that the
    method does not have, a value out of range, settings that exclude each other, and
    `history=true`, with which later runs would copy earlier ones.
    """
    written = written.strip()
    name, given = methods.split(written)
    method = BASELINES.get(name) or METHODS.get(name) or methods.ALIASES.get(name)
    if method is None:
        raise SpecgenError(
            f"there is no method {name!r}{nearest(name, [*METHODS, *BASELINES])}",
            f"All of them: {methods.ALL_METHODS}; from transformers: {', '.join(BASELINES)}",
        )
    choice = Choice(method, given, methods.resolve(method, given))
    if choice.settings.values.get("history"):
        raise SpecgenError(
            f"{written} would copy its own earlier outputs", "Leave history out in compare"
        )
    return MethodSpec(written, choice)


def parse_specs(texts: Sequence[str]) -> list[MethodSpec]:
    """Parses comma-separated lists of methods; without any, `methods.USUAL`. `all` means every
    specgen method but yardsticks (slow methods that only serve as a reference). Plain decoding
    always comes first; a method that is given twice is kept once. Raises as `parse_spec`."""
    every = [method.name for method in METHODS.values() if not method.tuning.is_yardstick]
    written = [REFERENCE]
    if not texts:
        written += methods.USUAL
    for text in texts:
        for part in map(str.strip, text.split(",")):
            written += every if part == EVERY else [part]
    return [parse_spec(method) for method in dict.fromkeys(written)]
