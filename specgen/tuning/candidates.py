"""The settings that are tried of each method. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random

from specgen.decoding.policies import POLICIES
from specgen.methods import METHODS, known_settings
from specgen.settings import Value

Given = Mapping[str, Value]

# The values that are tried of a method's settings. Other methods try the values of their policy's settings (`Setting.tuned`).
_GRIDS: Mapping[str, Mapping[str, Sequence[Value]]] = {
    "ar": {},
    "lookup": {"k": (1, 2, 3, 4, 6, 8, 10, 15), "ngram": (1, 2, 3, 4)},
    "pearl": {"window": range(1, 17)},
    "eesd-fixed": {"k": range(1, 13)},
    "eesd-beta": {"alpha": (1.0, 2.0, 5.0), "beta": (0.5, 1.0, 2.0, 5.0), "max_draft": (4, 8, 40)},
    "mtad": {"beams": (2, 4, 8, 16), "k": (2, 3, 4, 6, 8), "tau": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},
    "bild": {"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},
    "spectr": {"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},
    "specinfer": {"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},
    "eesd-tree": {"width": (2, 3, 4), "depth": (2, 3, 4, 5, 6)},
}
TREES = {"width": (2, 3, 4), "depth": (2, 3, 4, 5)}
RERUN = tuple(name for name, method in METHODS.items() if not method.drafter.recorded and not method.skips_layers)
REPLAYED = tuple(
    name for name, method in METHODS.items() if method.drafter.recorded and name != "eesd"
)  # eesd is one of two others


def _tried(name: str) -> Mapping[str, Sequence[Value]]:
    method = METHODS[name]
    if name in _GRIDS or method.policy is None:
        return _GRIDS[name]
    return {setting: values.tuned for setting, values in POLICIES[method.policy].settings.items() if values.tuned}


def grid(name: str) -> list[Given]:
    """All settings of a method that are tried, in an order without a pattern: where time is short, what was tried is spread. The
    usual ones come first."""
    found = list(_combined(_tried(name)))
    Random(0).shuffle(found)
    return sorted(found, key=lambda given: distance_from_defaults(name, given) > 0)


def distance_from_defaults(name: str, given: Given) -> int:
    """How many of a method's settings are not what they are where nobody sets them."""
    method = METHODS[name]
    known = known_settings(method, method.policy)
    return sum(known[key].default != value for key, value in given.items())


def _combined(values: Mapping[str, Sequence[Value]]) -> Iterator[Given]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def trees() -> list[Given]:
    """Shapes of draft trees, the largest first: what is recorded for one serves the smaller."""
    found = sorted(_combined(TREES), key=lambda given: (-int(given["width"]), -int(given["depth"])))
    return [{**given, "k": given["depth"]} for given in found]


def in_turn(grids: Mapping[str, Sequence[Given]]) -> Iterator[tuple[str, Given]]:
    """The methods' settings in turn: where time runs out, each has had some."""
    for position in range(max(map(len, grids.values()), default=0)):
        for name, settings in grids.items():
            if position < len(settings):
                yield name, settings[position]


def written(name: str, given: Given) -> str:
    """A method with its settings, as `compare` takes it."""
    return ":".join([name, *(f"{key}={_text(value)}" for key, value in given.items())])


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
