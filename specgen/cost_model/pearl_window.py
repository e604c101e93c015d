"""PEARL's window, from c: the time of a target pass over that of a draft pass (PEARL, section 4.1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

LONGEST_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Window:
    """PEARL's window: the number of tokens drafted during one target pass.

    `size` is PEARL's gamma, for a pass over `size` tokens. `first` is the number for the one-token pass of pre-verify, which is
    smaller where the time of a pass grows with its number of tokens, as on a CPU.
    """

    size: int
    first: int

    def beside(self, width: int) -> int:
        """Tokens to draft during a target pass over `width` tokens, so that both models finish at the same time."""
        if width >= self.size:
            return self.size
        return self.first + round((self.size - self.first) * (width - 1) / (self.size - 1))


@dataclass(frozen=True, slots=True)
class ParallelCosts:
    """Pass times of a pair while both models run at the same time: of one draft pass, and of target passes over `width` tokens
    and over one token, after a context of `context_length` tokens."""

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int

    @property
    def ratio(self) -> float:
        """c, for a target pass over `width` tokens."""
        return self.target_pass / self.draft_pass

    @property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, at least 1 (PEARL, Theorem 1)."""
        size = _rounded(self.ratio)
        return Window(size, min(size, _rounded(self.single_pass / self.draft_pass)))

    def as_dict(self) -> dict[str, float]:
        """The `costs` of a trace's start line: the measured times, c and the window."""
        return {**asdict(self), "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)
