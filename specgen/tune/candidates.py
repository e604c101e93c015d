"""Lists the settings that tuning tries for each method. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random

from specgen.base.settings import Value
from specgen.decoding.policies import POLICIES
from specgen.methods.table import METHODS, known_settings

GivenSettings = Mapping[str, Value]  # settings by name; a setting that is missing has its default

_Grid = Mapping[str, Sequence[Value]]
_NGRAMS = (1, 2, 3, 4)
_GRIDS: Mapping[str, _Grid] = {
    "ar": {},
    "lookup": {"ngram": _NGRAMS},  # with the policy `adaptive`
    "suffix": {"min_prob": (0.05, 0.1, 0.2, 0.4), "factor": (1.0, 2.0, 4.0)},
    "pearl": {"window": ("auto", *range(1, 17))},
    "eesd-fixed": {"k": range(1, 13)},
    "eesd-beta": {"alpha": (1.0, 2.0, 5.0), "beta": (0.5, 1.0, 2.0, 5.0), "max_draft": (4, 8, 40)},
    "mtad": {"beams": (2, 4, 8, 16), "k": (2, 3, 4, 6, 8), "tau": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},
    "bild": {"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},
    "spectr": {"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},
    "specinfer": {"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},
    "medusa": {"nodes": (0, 5, 10, 20), "k": (2, 3, 4)},
    "eagle": {"width": (2, 4), "nodes": (4, 6, 10, 16), "k": (2, 3, 5, 7)},
    "glide": {"k": (1, 2, 3, 4, 5, 6, 8)},
    "lookahead": {"window": (1, 2, 3, 5, 10, 15), "ngram": (2, 3, 4, 5), "guesses": (3, 7, 15)},
    "ouroboros": {"k": (3, 5, 8, 12), "ngram": (3, 4, 5, 7), "branches": (1, 3), "window": (2, 4, 8, 15)},
    "eesd-tree": {"width": (2, 3, 4), "depth": (2, 3, 4, 5, 6)},
}
_SVIP: _Grid = {"policy": ("svip",), "threshold": (0.3, 0.4, 0.5, 0.7)}
_ADAPTIVE: _Grid = {"policy": ("adaptive",)}
_CAPE: _Grid = {"cape": (True,), "k": (2, 3, 5, 8)}
# tried besides: chains, CaPE, and other length policies (a `k` alone means `policy=fixed`)
_OTHERS: Mapping[str, Sequence[_Grid]] = {
    "lookup": ({"k": (1, 2, 3, 4, 6, 8, 10, 15), "ngram": _NGRAMS},),
    "medusa": (_ADAPTIVE,),
    "eagle": ({"width": (1,), "k": (1, 2, 3, 5, 8)}, {"width": (1,), **_CAPE}, _SVIP, _ADAPTIVE, {"width": (1,), **_SVIP}),
    "glide": (_CAPE, _SVIP, _ADAPTIVE),
}
SEARCHED = tuple(
    name for name, method in METHODS.items() if not (method.drafter.recorded or method.skips_layers or method.is_yardstick)
)
SIMULATED = tuple(name for name, method in METHODS.items() if method.drafter.recorded and name != "eesd")  # -cali or -beta


def grid(name: str) -> list[GivenSettings]:
    """Returns all combinations of settings that are tried for the method `name`: the defaults, then those near them.

    These differ in one setting. The others are shuffled: a search that runs out of time has then tried some from the whole
    range. The values are those in `_GRIDS` and `_OTHERS`; for a method that is not in `_GRIDS`, those that its length policy's
    settings list (`Setting.tuned`).
    """
    policy = METHODS[name].policy
    if name in _GRIDS or policy is None:
        values = _GRIDS[name]
    else:
        values = {setting: known.tuned for setting, known in POLICIES[policy].settings.items() if known.tuned}
    grids = [values, *_OTHERS.get(name, ())]
    found = [dict(zip(each, chosen, strict=True)) for each in grids for chosen in product(*each.values())]
    Random(0).shuffle(found)
    return sorted(found, key=lambda settings: min(2, distance_from_defaults(name, settings)))


def distance_from_defaults(name: str, settings: GivenSettings) -> int:
    """Returns how many of the settings differ from the method's defaults, or are of another length policy."""
    method = METHODS[name]
    policy = settings.get("policy", method.policy)
    known = known_settings(method, None if policy is None else str(policy))
    own = [key not in known or known[key].default != value for key, value in settings.items() if key != "policy"]
    return (policy != method.policy) + sum(own)


def trees() -> list[GivenSettings]:
    """Returns the settings of `sd` that are searched: draft trees, the largest tree first, and chains with CaPE's candidates.

    The model outputs for a large tree are kept (`MemoisedRunner`) and used again for the smaller trees that it contains.
    """
    widths = [{"width": width, "depth": depth, "k": depth} for width in (4, 3, 2) for depth in (5, 4, 3, 2)]
    return [*widths, *(dict(zip(_CAPE, chosen, strict=True)) for chosen in product(*_CAPE.values()))]


def round_robin(grids: Mapping[str, Sequence[GivenSettings]]) -> Iterator[tuple[str, GivenSettings]]:
    """Yields (method, settings): the first settings of every method, then the second of every method, and so on.

    A search that runs out of time has then tried some settings of every method.
    """
    for position in range(max(map(len, grids.values()), default=0)):
        for name, settings in grids.items():
            if position < len(settings):
                yield name, settings[position]
