"""Drafts from what the user expects the output to be, such as a file of which a few lines are to be
changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.base.types import Context, Draft

if TYPE_CHECKING:
    from specgen.decoding.verification import Verifier

FIRST_LENGTH = 8  # tokens of a draft, while the expectation is not confirmed
LONGEST = 64  # tokens of a draft, as long as all are accepted
_LONGEST_MATCH = 32  # tokens


class PredictedOutput:
    """Drafts the tokens of an expected output, as long as the output follows it.

    `tokens` are the expected ones, `verifier` verifies these drafts: any lossless verifier does,
    because they are not drawn at random. Where the output leaves the expectation, no more is
    drafted until its last tokens, at least two, occur there again: then the longest match counts,
    and of several the nearest after the place where the output has left. A draft is twice as long
    as the one before if that was accepted, else `FIRST_LENGTH`.
    """

    def __init__(self, tokens: Sequence[int], verifier: Verifier) -> None:
        self.verifier = verifier
        self._tokens = list(tokens)
        self._place = 0  # of the token that is expected next
        self._follows = True
        self._read = 0  # tokens of the output
        self._drafted = 0  # tokens of the last draft
        self._length = FIRST_LENGTH
        self._ends: dict[tuple[int, int], list[int]] = {}  # the places after each two tokens
        for place in range(2, len(tokens) + 1):
            self._ends.setdefault((tokens[place - 2], tokens[place - 1]), []).append(place)

    @property
    def state(self) -> tuple[int, bool, int, int]:
        """What later drafts depend on, besides the output."""
        return self._place, self._follows, self._drafted, self._length

    def propose(self, context: Context, limit: int) -> Draft:
        """Drafts at most `limit` tokens after the context, which has only grown since the last
        call; an empty draft if the output does not follow the expectation."""
        output = context.ids[context.prompt_length :]
        self._follow(output)
        if not self._follows:
            return Draft()
        length = min(self._length, limit)
        tokens = self._tokens[self._place : self._place + max(length, 0)]
        self._drafted = len(tokens)
        reason = "end of prediction" if len(tokens) < length else f"prediction {len(tokens)}"
        return Draft.chain(tokens, stop_reason=reason) if tokens else Draft()

    def _follow(self, output: Sequence[int]) -> None:
        """Reads the output's new tokens."""
        agreed = 0
        for token in output[self._read :]:
            if self._follows and self._tokens[self._place : self._place + 1] == [token]:
                self._place += 1
                agreed += 1
            else:
                self._follows = False
        if self._drafted:
            is_accepted = agreed >= self._drafted
            self._length = min(2 * self._length, LONGEST) if is_accepted else FIRST_LENGTH
            self._drafted = 0
        if not self._follows and len(output) > self._read:
            self._find(output)
        self._read = len(output)

    def _find(self, output: Sequence[int]) -> None:
        """Looks for the output's last tokens in the expectation."""
        if len(output) < 2:
            return

        def rank(place: int) -> tuple[int, bool, int]:
            is_after = place >= self._place
            return self._matched(output, place), is_after, -place if is_after else place

        places = self._ends.get((output[-2], output[-1]))
        if places is not None:
            self._place = max(places, key=rank)
            self._follows = True

    def _matched(self, output: Sequence[int], place: int) -> int:
        """Returns how many of the output's last tokens equal those before a place."""
        longest = min(len(output), place, _LONGEST_MATCH)
        count = 2
        while count < longest and output[-1 - count] == self._tokens[place - 1 - count]:
            count += 1
        return count
