"""Parses the methods that `specgen compare` gets on the command line, such as `svip`,
`sd:policy=svip:threshold=0.3` or `selfsd:skip=3+5+7`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.settings import Value
from specgen.compare.baselines import BASELINES
from specgen.methods import Choice

if TYPE_CHECKING:
    from specgen.engine.loaded_model import LoadedModel

REFERENCE = "ar"  # plain decoding, which all other methods are compared with
EVERY = "all"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method and its settings. `written` is the text on the command line, which identifies the
    method in results. `tuned_on` are the fingerprints of the prompts on which `specgen tune` chose
    these settings; None if they are not from a profile. `has_own_numbers`: a baseline that computes
    in another dtype than the target, or without its rounded weights, and so may give other tokens
    than a lossless method.
    """

    written: str
    choice: Choice
    tuned_on: frozenset[str] | None = None
    has_own_numbers: bool = False

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
    def dtype(self) -> str:
        """The dtype of a baseline; empty if it is not known yet, and for specgen's methods."""
        return str(self.choice.settings.values.get("dtype", "")) if self.is_baseline else ""

    @property
    def label(self) -> str:
        """What tables call the method: as it is written, a baseline with its dtype."""
        if not self.dtype:
            return self.written
        return f"{self.written.replace(f':dtype={self.dtype}', '')}, {self.dtype}"

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


def parse_spec(written: str, *, is_named: bool = True) -> MethodSpec:
    """Parses one method with its settings. Unless it `is_named` by the user, no module is imported
    for it.

    Raises SpecgenError for an unknown method, a setting that is not written NAME=VALUE or that the
    method does not have, a value out of range, settings that exclude each other, and
    `history=true`, with which later runs would copy earlier ones.
    """
    written = written.strip()
    name, given = methods.split(written)
    find = methods.named if is_named else methods.find
    method = BASELINES.get(name) or find(name, others=BASELINES)
    choice = Choice(method, given, methods.resolve(method, given))
    if choice.settings.values.get("history"):
        raise SpecgenError(
            f"{written} would copy its own earlier outputs", "Leave history out in compare"
        )
    return MethodSpec(written, choice)


def with_dtypes(
    specs: Sequence[MethodSpec], target: LoadedModel, *, adds_rows: bool
) -> list[MethodSpec]:
    """Returns `specs` with the dtypes of their baselines: where none is written, the one in which
    the target computes.

    With `adds_rows`, a baseline without a written dtype is followed by the same in the 16-bit dtype
    in which the target is stored, if the target computes in another one on a CPU.
    """
    own = str(target.dtype).removeprefix("torch.")
    stored = target.stored_dtype if adds_rows else None
    found = []
    for spec in specs:
        if not spec.is_baseline:
            found.append(spec)
            continue
        found.append(_in_dtype(spec, spec.dtype or own, target))
        if stored is not None and not spec.dtype:
            narrow = parse_spec(f"{spec.written}:dtype={stored}")
            found.append(_in_dtype(narrow, stored, target))
    return list({spec.written: spec for spec in reversed(found)}.values())[::-1]


def _in_dtype(spec: MethodSpec, dtype: str, target: LoadedModel) -> MethodSpec:
    settings = spec.choice.settings.with_value("dtype", dtype)
    has_own_numbers = dtype != target.dtype_name
    choice = replace(spec.choice, settings=settings)
    return replace(spec, choice=choice, has_own_numbers=has_own_numbers)


def parse_specs(texts: Sequence[str]) -> list[MethodSpec]:
    """Parses comma-separated lists of methods; without any, `methods.USUAL`. `all` means every
    specgen method but yardsticks (slow methods that only serve as a reference). Plain decoding
    always comes first; a method that is given twice is kept once. Raises as `parse_spec`."""
    every = [method.name for method in methods.OURS if not method.tuning.is_yardstick]
    written = [REFERENCE]
    if not texts:
        written += methods.USUAL
    for text in texts:
        for part in map(str.strip, text.split(",")):
            written += every if part == EVERY else [part]
    return [parse_spec(method) for method in dict.fromkeys(written)]
