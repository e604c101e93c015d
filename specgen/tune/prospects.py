"""Which methods are worth the time of a tuning. The likeliest ones are really run first; those that
are predicted to be much slower than the fastest are not simulated further. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from specgen.methods import DEFAULT_METHOD, METHODS, USUAL
from specgen.tune.outcome import PLAIN, is_simple

if TYPE_CHECKING:
    from specgen.base.settings import Value
    from specgen.pair.figures import Figures

MOST_LIKELY = 3  # methods that are really run first, besides plain decoding and the default
BEHIND = 0.7  # settings that are slower than this share of the fastest known ones are far behind
# A simulation ends when even this many more accepted tokens would leave its settings far behind.
SLACK = 2
LARGER_SLACK = 12  # for chains: some rejected drafts at the beginning do not end their simulation
STRIKES = 4  # settings in a row that were far behind, after which a method is given up


def likeliest(names: Collection[str], named: Collection[str]) -> list[str]:
    """Returns the methods of `names` to run first, the likeliest to be fast first: those that the
    user `named`, or else one for each thing that can draft here, such as the draft model, a head or
    the text itself.

    PEARL, whose worker has to be started and timed first, is only among them if it was named. Lossy
    methods come last.
    """
    usual = [
        name for name in (*USUAL, *METHODS) if name in names and name not in (PLAIN, DEFAULT_METHOD)
    ]
    chosen = dict[str, str]()  # by what drafts, if none is named
    for name in dict.fromkeys(usual):
        method = METHODS[name]
        is_light = method.head or is_simple(name)
        if named and name in named:
            chosen[name] = name
        elif not named and method.lossless and is_light and not method.is_parallel:
            chosen.setdefault(method.tuning.drafts, name)
    return sorted(chosen.values(), key=lambda name: not METHODS[name].lossless)[:MOST_LIKELY]


class Prospects:
    """What is known so far about how fast methods can be, as speedups over plain decoding.

    `named` are the methods that the user named: their settings are compared only with others of the
    same method. `token_seconds` are those of plain decoding. `pass_seconds` returns the seconds of
    a target pass over so many tokens. Expected speeds are only compared with expected ones: where
    rounds took other times while they were timed than in real runs, all are wrong alike.
    """

    def __init__(
        self, named: Collection[str], token_seconds: float, pass_seconds: Callable[[int], float]
    ) -> None:
        self._named = named
        self._token_seconds = token_seconds
        self._pass_seconds = pass_seconds
        self._best = 1.0
        self._best_of: dict[str, float] = {}
        self._strikes = defaultdict[str, int](int)

    def note(self, name: str, speedup: float) -> None:
        """Takes note of a simulated speedup."""
        if METHODS[name].lossless:
            self._best = max(self._best, speedup)
        self._best_of[name] = max(self._best_of.get(name, 0.0), speedup)
        self._strikes[name] = 0

    def strike(self, name: str) -> None:
        """Takes note of settings of the method that are far behind."""
        self._strikes[name] += 1

    def is_given_up(self, name: str) -> bool:
        """Whether no more settings of the method are worth a simulation.

        Simulations of methods whose drafts are no chains run the models, so for these the first
        settings decide.
        """
        return self._strikes[name] >= (STRIKES if is_simple(name) else 1)

    def floor(self, name: str) -> float:
        """Returns the speedup below which settings of the method are far behind: `BEHIND` times the
        best speedup so far of any lossless method, or for a method that the user named, of this
        method.

        It is 0 for plain decoding, and for a method whose drafts are chains until some of its
        settings were simulated. So every such method has settings, for users and engines that want
        this method.
        """
        if name == PLAIN or (is_simple(name) and name not in self._best_of):
            return 0.0
        return BEHIND * (self._best_of.get(name, 0.0) if name in self._named else self._best)

    def can_reach(self, name: str, settings: Mapping[str, Value]) -> bool:
        """Whether the settings can keep up: they are not far behind if half of each draft is
        accepted.

        This is known only of lookahead, whose passes run its whole window (W columns of N - 1
        tokens), whatever they accept.
        """
        if name != "lookahead":
            return True
        window = int(settings["window"])
        ngram = int(settings["ngram"])
        longest = max(ngram, window) - 1 if ngram == 2 else ngram - 1
        tokens = 1 + longest / 2
        seconds = self._pass_seconds(window * (ngram - 1))
        return tokens * self._token_seconds / seconds >= self.floor(name)

    def is_behind(self, name: str, figures: Figures) -> bool:
        """Whether a simulation with these figures so far is far behind, even with `SLACK` more
        tokens in the same time; `LARGER_SLACK` for a method whose drafts are chains."""
        seconds = figures.seconds - figures.phase_seconds["prefill"]
        slack = LARGER_SLACK if is_simple(name) else SLACK
        tokens = figures.new_tokens + slack
        return seconds > 0 and tokens * self._token_seconds / seconds < self.floor(name)
