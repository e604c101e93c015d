"""PEARL's window, computed from c = time of a target pass / time of a draft pass (PEARL, section 4.1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

LONGEST_WINDOW = 64
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
    """

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int

    @property
    def ratio(self) -> float:
        """c = time of a target pass over `width` tokens / time of a draft pass."""
        return self.target_pass / self.draft_pass

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
        slope = (self.target_pass - self.single_pass) / max(self.width - 1, 1)
        further = self.target_pass / (1 - _ACCEPTANCE**window.size)

        def seconds(lead: int) -> float:
            return lead * self.draft_pass + self.single_pass + lead * slope + _ACCEPTANCE ** (lead + 1) * further

        longest = min(LONGEST_WINDOW, round(_MARGIN * window.size))
        return Window(longest, longest, min(range(window.size), key=seconds), is_flexible=True)

    def as_dict(self) -> dict[str, float]:
        """The measured times, c (`ratio`) and the window, as the first line of a trace file lists them under `costs`."""
        return {**asdict(self), "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)
