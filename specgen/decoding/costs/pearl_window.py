"""PEARL's window, computed from c = time of a target pass / time of a draft pass (PEARL, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

LONGEST_WINDOW = 64
ROUGH_WIDTH = 8  # tokens of the target passes from which the window is first estimated
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
    each other, 0 if they take turns, negative if they are slower together. `draft_alone` is one draft pass while the target is
    idle, `target_alone` a target pass over `width` tokens while the draft model is idle. All three are None where they were not
    measured: unless one thread runs both models.
    """

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int
    overlap: float | None = None
    draft_alone: float | None = None
    target_alone: float | None = None

    @property
    def seconds(self) -> tuple[float, float, float]:
        """All times."""
        return self.draft_pass, self.target_pass, self.single_pass

    @property
    def take_turns(self) -> bool:
        """Whether the models were measured not to run at the same time, so that PEARL gains little over drafting first."""
        return self.overlap is not None and self.overlap < LEAST_OVERLAP

    def with_overlap(self, overlap: float | None, draft_alone: float | None, target_alone: float | None) -> ParallelCosts:
        """Returns these costs with a measured overlap, or with none."""
        return replace(self, overlap=overlap, draft_alone=draft_alone, target_alone=target_alone)

    @property
    def added_by_token(self) -> float:
        """Seconds that a drafted token adds to a target pass: 0 if the models were not measured to slow each other."""
        if self.overlap is None or self.draft_alone is None:
            return 0.0
        return (1 - min(1.0, self.overlap)) * self.draft_alone

    def step_seconds(self, size: int) -> float:
        """Seconds of a step of PEARL: a target pass, and a draft of `size` tokens at the same time."""
        if self.overlap is None or self.draft_alone is None or self.target_alone is None:
            return max(self.target_pass, size * self.draft_pass)
        drafting = size * self.draft_alone
        return self.target_alone + drafting - min(1.0, self.overlap) * min(self.target_alone, drafting)

    def speed(self, size: int, acceptance: float = _ACCEPTANCE) -> float:
        """Returns PEARL's expected tokens per second with this window, if tokens are accepted with this probability.

        From one rejection to the next, 1 / (1 - acceptance) tokens are generated: by a step that verifies one token, and further
        ones, as long as all tokens are accepted, that verify `size` tokens each.
        """
        steps = 1 + acceptance / (1 - acceptance**size)
        return 1 / (1 - acceptance) / (steps * self.step_seconds(size))

    def sequential_speed(self, size: int, acceptance: float = _ACCEPTANCE) -> float:
        """Returns the expected tokens per second of drafting `size` tokens before each target pass (the method `sd`)."""
        draft = self.draft_pass if self.draft_alone is None else self.draft_alone
        target = self.target_pass if self.target_alone is None else self.target_alone
        return sum(acceptance**position for position in range(size + 1)) / (target + size * draft)

    @property
    def gain(self) -> float | None:
        """PEARL's expected speed / that of `sd`, each with its best number of tokens. None if `overlap` was not measured."""
        if self.overlap is None:
            return None
        sizes = range(1, LONGEST_WINDOW + 1)
        return max(map(self.speed, sizes)) / max(map(self.sequential_speed, sizes))

    @property
    def ratio(self) -> float:
        """c = time of a target pass over `width` tokens / time of a draft pass."""
        return self.target_pass / self.draft_pass

    @property
    def remark(self) -> str:
        """What limits PEARL here, in words; empty if nothing was measured to."""
        if not self.take_turns:
            return ""
        return f"the models take turns on this machine, so PEARL is expected to have {self.gain:.2f} times the speed of sd"

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens, on the line through the two measured ones."""
        return self.single_pass + (self.target_pass - self.single_pass) / max(self.width - 1, 1) * (width - 1)

    def run_window(self, *, is_flexible: bool) -> Window:
        """The window of a run: the flexible one for runs in which drafts may end with the target pass (see `Pair`)."""
        return self.flexible_window if is_flexible else self.window

    @property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, from 1 to `LONGEST_WINDOW` (PEARL, Theorem 1).

        Where the models slow each other, a shorter window can be faster; then it is the fastest one.
        """
        size = _rounded(self.ratio)
        if self.added_by_token > 0:
            size = max(range(1, size + 1), key=self.speed)
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


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)
