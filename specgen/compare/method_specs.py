"""Methods as `compare` is told them: `svip`, `sd:policy=svip:threshold=0.3`, `selfsd:skip=3+5+7`, and the rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgen import methods
from specgen.compare.baselines import RIVALS, baseline_settings
from specgen.errors import SpecgenError, nearest

BASELINE = "ar"
EVERY = "all"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method as written, and what that means. `settings` are the user's, not yet completed by defaults."""

    written: str
    name: str
    settings: Mapping[str, str]
    lossless: bool

    @property
    def is_rival(self) -> bool:
        return self.name in RIVALS

    @property
    def is_parallel(self) -> bool:
        """Whether the draft works beside the target, in a process that takes a while to start."""
        return not self.is_rival and methods.find(self.name).is_parallel


def parse_spec(written: str) -> MethodSpec:
    """Raises SpecgenError for a name that is not known, with the nearest one, and for settings that the method does not have."""
    name, *pairs = (part.strip() for part in written.strip().split(":"))
    settings = _settings(written, pairs)
    if name in RIVALS:
        baseline_settings(name, settings)
        return MethodSpec(written.strip(), name, settings, lossless=True)
    if name not in methods.METHODS:
        known = [*methods.METHODS, *RIVALS]
        raise SpecgenError(
            f"there is no method {name!r}{nearest(name, known)}",
            f"All of them: {methods.ALL_METHODS}; the rivals: {', '.join(RIVALS)}",
        )
    method = methods.find(name)
    methods.resolve(method, settings)
    return MethodSpec(written.strip(), name, settings, method.lossless)


def parse_specs(texts: Sequence[str]) -> list[MethodSpec]:
    """Lists between commas, `all` standing for every method of the table; plain decoding first, nothing twice."""
    written = [part.strip() for text in texts for part in text.split(",")]
    if not all(written):
        raise SpecgenError(f"--methods is {','.join(texts)!r}: a name is missing", "Write it like --methods svip,sd:k=8,lookup")
    names = [name for part in written for name in (methods.METHODS if part == EVERY else [part])]
    return [parse_spec(name) for name in dict.fromkeys([BASELINE, *names])]


def _settings(written: str, pairs: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SpecgenError(
                f"cannot read {pair!r} in {written!r}", "Write settings like sd:policy=svip:threshold=0.3, lists like 3+5+7"
            )
        settings[name] = value
    return settings
