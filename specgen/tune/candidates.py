"""Lists the settings that tuning tries for each method. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random

from specgen.base.settings import Value
from specgen.methods import METHODS, POLICIES, known_settings
from specgen.methods.method import Grid

GivenSettings = Mapping[str, Value]  # settings by name; a setting that is missing has its default

SEARCHED = tuple(name for name, method in METHODS.items() if not (method.recorded or method.skips_layers or method.is_yardstick))
SIMULATED = tuple(name for name, method in METHODS.items() if method.recorded and not method.stands_for)


def grid(name: str) -> list[GivenSettings]:
    """Returns all combinations of settings that are tried for the method `name`: the defaults, then those near them.

    These differ in one setting. The others are shuffled: a search that runs out of time has then tried some from the whole
    range. The values are those in `Method.grids`; without any, those that the settings of its length policy list
    (`Setting.tuned`).
    """
    method = METHODS[name]
    grids = method.grids
    if grids is None:
        assert method.policy is not None
        grids = [{setting: known.tuned for setting, known in POLICIES[method.policy].settings.items() if known.tuned}]
    found = _combinations(grids)
    Random(0).shuffle(found)
    return sorted(found, key=lambda settings: min(2, distance_from_defaults(name, settings)))


def searched_grid(name: str) -> list[GivenSettings]:
    """Returns the settings of a method simulated on recorded drafts that are searched besides, by running its drafter."""
    return _combinations(METHODS[name].searched_grids)


def _combinations(grids: Sequence[Grid]) -> list[GivenSettings]:
    return [dict(zip(each, chosen, strict=True)) for each in grids for chosen in product(*each.values())]


def distance_from_defaults(name: str, settings: GivenSettings) -> int:
    """Returns how many of the settings differ from the method's defaults, or are of another length policy."""
    method = METHODS[name]
    policy = settings.get("policy", method.policy)
    known = known_settings(method, None if policy is None else str(policy))
    own = [key not in known or known[key].default != value for key, value in settings.items() if key != "policy"]
    return (policy != method.policy) + sum(own)


def round_robin(grids: Mapping[str, Sequence[GivenSettings]]) -> Iterator[tuple[str, GivenSettings]]:
    """Yields (method, settings): the first settings of every method, then the second of every method, and so on.

    A search that runs out of time has then tried some settings of every method.
    """
    for position in range(max(map(len, grids.values()), default=0)):
        for name, settings in grids.items():
            if position < len(settings):
                yield name, settings[position]
