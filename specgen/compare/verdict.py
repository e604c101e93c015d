"""Whether a method's greedy output is the target's own: token ids decide, up to logits that are equal within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.pair import Pair

OUTCOMES = ("identical", "tied", "diverged")  # keys of the counts of prompts in JSON and CSV, from best to worst


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between an answer and plain decoding's, after `position` tokens that are the same in both.

    `gap` is the target's logit of plain decoding's token minus that of the other token, None where one of the answers ends.
    A gap below `threshold` is a tie.
    """

    prompt_index: int
    repeat: int
    position: int
    reference_id: int | None
    token_id: int | None
    gap: float | None
    threshold: float

    @property
    def is_broken(self) -> bool:
        """Whether rounding does not explain it: a lossless method must not have such a difference."""
        return self.gap is None or not abs(self.gap) < self.threshold

    def as_dict(self) -> dict[str, Any]:
        """The entry of a JSON line's `differences`, whose keys are a promise."""
        fields = asdict(self)
        return {"place": fields.pop("position"), **fields, "tie": not self.is_broken}

    def explanation(self, methods: str, prompt: str) -> str:
        """A sentence on where these methods left plain decoding's output, and whether rounding explains it."""
        if not self.is_broken:
            return (
                f"tie at {self.position} of {prompt} ({methods}): "
                f"the two tokens' logits are {abs(self.gap or 0):.2g} apart; rounding explains {self.threshold:.2g}."
            )
        where = f"{methods} differs from plain decoding at {self.position} of {prompt}"
        if self.gap is None:
            return f"{where}: one answer ends there, and the other does not."
        side = "lower" if self.gap > 0 else "higher"
        return (
            f"{where}: the target's logit of its token is {abs(self.gap):.3g} {side} than that of ar's token, "
            f"and rounding explains at most {self.threshold:.3g}."
        )


def count_outcomes(prompts: int, differences: Sequence[Difference]) -> dict[str, int]:
    """Of `prompts` prompts, how many have each of `OUTCOMES`; a prompt counts with the worst outcome of its repeats."""
    broken = {found.prompt_index for found in differences if found.is_broken}
    tied = {found.prompt_index for found in differences} - broken
    return dict(zip(OUTCOMES, (prompts - len(broken) - len(tied), len(tied), len(broken)), strict=True))


def outcome_text(differences: Sequence[Difference]) -> str:
    """The worst outcome in the words of a table's cell: `same`, `tie at 57`, `2 ties`, `2 differ`."""
    broken = [found for found in differences if found.is_broken]
    worst = broken or differences
    if not worst:
        return "same"
    if (count := len({found.prompt_index for found in worst})) > 1:
        return f"{count} differ" if broken else f"{count} ties"
    return f"{'differs' if broken else 'tie'} at {worst[0].position}"


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """The position of the first token that differs, None where all are the same."""
    if list(reference) == list(other):
        return None
    shorter = min(len(reference), len(other))
    return next((position for position in range(shorter) if reference[position] != other[position]), shorter)


def judge(
    pair: Pair, prompt_index: int, repeat: int, prompt_ids: Sequence[int], reference: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare an answer with plain decoding's; at the first difference one uncached pass of the target scores both tokens."""
    from specgen.engine.tolerances import FLOAT32_TIE, tie_threshold

    position = first_difference(reference, other)
    if position is None:
        return None
    reference_id, token_id = (answer[position] if position < len(answer) else None for answer in (reference, other))
    if reference_id is None or token_id is None:
        return Difference(prompt_index, repeat, position, reference_id, token_id, None, FLOAT32_TIE)
    logits = pair.reference_logits(prompt_ids, reference[:position])
    gap = float(logits[reference_id] - logits[token_id])
    threshold = tie_threshold(pair.target.dtype_name, float(logits.max()))
    return Difference(prompt_index, repeat, position, reference_id, token_id, gap, threshold)
