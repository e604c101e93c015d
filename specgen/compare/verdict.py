"""Is it the target's own output? In greedy decoding ids say so, up to where two tokens score the same within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.pair import Pair


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first leaves plain decoding's. `place` counts the tokens before it, which are the same in both.

    `gap` is how much higher the target scores plain decoding's token than the other (below 0: lower), None where one of the two
    answers simply ends. Under `threshold` it is a tie.
    """

    prompt_index: int
    repeat: int
    position: int
    reference_id: int | None
    token_id: int | None
    gap: float | None
    threshold: float

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and abs(self.gap) < self.threshold

    def as_dict(self) -> dict[str, Any]:
        renamed = {
            "place" if name == "position" else name: value for name, value in asdict(self).items()
        }  # the key's name is promised
        return renamed | {"tie": self.is_tie}


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that is not the same, None where all are."""
    if list(reference) == list(other):
        return None
    shorter = min(len(reference), len(other))
    return next((position for position in range(shorter) if reference[position] != other[position]), shorter)


def judge(
    pair: Pair, prompt_index: int, repeat: int, prompt_ids: Sequence[int], reference: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare an answer with plain decoding's; at a difference one uncached pass of the target scores both tokens."""
    from specgen.engine.tolerances import FLOAT32_TIE, tie_below

    position = first_difference(reference, other)
    if position is None:
        return None
    ids = [answer[position] if position < len(answer) else None for answer in (reference, other)]
    if ids[0] is None or ids[1] is None:
        return Difference(prompt_index, repeat, position, ids[0], ids[1], None, FLOAT32_TIE)
    row = pair.reference_logits(prompt_ids, reference[:position])
    gap = float(row[ids[0]] - row[ids[1]])
    return Difference(prompt_index, repeat, position, ids[0], ids[1], gap, tie_below(pair.target.dtype_name, float(row.max())))
