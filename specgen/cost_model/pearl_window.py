"""PEARL's window, computed from c = time of a target pass / time of a draft pass (PEARL, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from specgen.cost_model.round_costs import RoundCosts

LONGEST_WINDOW = 64
ROUGH_WIDTH = 8  # tokens of the target passes from which the window is first estimated
_SHORTEST = 1e-9  # seconds
LEAST_OVERLAP = 0.25  # below, the models count as taking turns
_TURNS = 2  # estimates of the window after the first
_ACCEPTANCE = 0.7  # assumed probability that a drafted token is accepted
_MARGIN = 1.5  # how far the draft model may get ahead of its expected number of tokens, if a target pass takes longer


@dataclass(frozen=True, slots=True)
class Window:
    """PEARL's window: the number of tokens that the draft model drafts during one target pass.

    `size` (PEARL's gamma) is this number while the target verifies a whole window, so `size` tokens. `first` is this number while
    the target passes over one token (PEARL's pre-verify); it is smaller than `size` if such a pass is shorter, as on a CPU.
    If `is_flexible`, a draft ends with the target pass, and `size` only limits it. Then `lead` is the number of tokens that the
    target waits for after a rejection, and verifies in its next pass; in the paper it waits for none.
    """

    size: int
    first: int
    lead: int = 0
    is_flexible: bool = False

    @property
    def longest(self) -> int:
        """The largest number of tokens in one draft."""
        return self.lead + self.size

    def beside(self, width: int) -> int:
        """Returns how many tokens to draft during a target pass over `width` tokens, so that both models finish together."""
        if width >= self.size:
            return self.size
        return self.first + round((self.size - self.first) * (width - 1) / (self.size - 1))


@dataclass(frozen=True, slots=True)
class ParallelCosts:
    """Seconds of forward passes while target and draft model run at the same time, with `context_length` tokens in the caches.

    `draft_pass` is one draft pass, `target_pass` a target pass over `width` tokens, `single_pass` a target pass over one token.
    `overlap` is how much of the shorter one's time both models save together, against one after the other: 1 if they do not slow
    each other, 0 if they take turns, negative if they are slower together. None where it was not measured: only on a shared GPU.
    """

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int
    overlap: float | None = None

    @property
    def seconds(self) -> tuple[float, float, float]:
        """All times."""
        return self.draft_pass, self.target_pass, self.single_pass

    @property
    def take_turns(self) -> bool:
        """Whether the models were measured not to run at the same time, so that PEARL gains little over drafting first."""
        return self.overlap is not None and self.overlap < LEAST_OVERLAP

    @property
    def ratio(self) -> float:
        """c = time of a target pass over `width` tokens / time of a draft pass."""
        return self.target_pass / self.draft_pass

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens, on the line through the two measured ones."""
        return self.single_pass + (self.target_pass - self.single_pass) / max(self.width - 1, 1) * (width - 1)

    def run_window(self, *, is_flexible: bool) -> Window:
        """The window of a run: the flexible one for runs in which drafts may end with the target pass (see `Pair`)."""
        return self.flexible_window if is_flexible else self.window

    @property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, from 1 to `LONGEST_WINDOW` (PEARL, Theorem 1)."""
        size = _rounded(self.ratio)
        return Window(size, min(size, _rounded(self.single_pass / self.draft_pass)))

    @property
    def flexible_window(self) -> Window:
        """The window of drafts that end with the target pass, so that neither model waits for the other.

        From one rejection to the next, about the same number of tokens is generated whatever `lead` is. With a lead of n the time
        is n draft passes, a target pass over n + 1 tokens, and, if all of these are accepted, further passes that verify a whole
        window each. The lead with the shortest time is taken.
        """
        window = self.window
        further = self.target_pass / (1 - _ACCEPTANCE**window.size)

        def seconds(lead: int) -> float:
            return lead * self.draft_pass + self.pass_seconds(lead + 1) + _ACCEPTANCE ** (lead + 1) * further

        longest = min(LONGEST_WINDOW, round(_MARGIN * window.size))
        return Window(longest, longest, min(range(window.size), key=seconds), is_flexible=True)

    def as_dict(self) -> dict[str, float]:
        """The measured times, c (`ratio`) and the window, as the first line of a trace file lists them under `costs`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {**given, "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


def settled(rough: ParallelCosts, measure: Callable[[int], ParallelCosts], widest: int = LONGEST_WINDOW) -> ParallelCosts:
    """Returns costs whose `width` is (nearly) the window that follows from them.

    The window depends on the time of a target pass, and this time on the number of tokens, which is the window. So the window is
    first estimated from `rough` costs; then `measure` returns the costs with target passes over that many tokens, at most
    `widest`, and once more if the window then changes by more than one token.
    """
    costs = rough
    for _ in range(_TURNS):
        width = min(costs.window.size, widest)
        costs = measure(width)
        if abs(costs.window.size - width) <= 1:
            break
    return costs


def costs_of_rounds(costs: RoundCosts, context_length: int) -> ParallelCosts:
    """Returns the pass times that PEARL's window is computed from, out of the costs of PEARL's rounds that tuning measured."""

    def at(width: int) -> ParallelCosts:
        verification = costs.verification_cost
        passes = verification.at(width, context_length), verification.at(1, context_length)
        draft_pass = max(costs.draft_cost.at(width, context_length) / width, _SHORTEST)
        return ParallelCosts(draft_pass, *passes, width, context_length)

    return settled(at(ROUGH_WIDTH), at)


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)
