"""Is it the target's own output? In greedy decoding ids say so, up to where two tokens score the same within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.pair import Pair

FLOAT32_TIE = 1e-3  # logits; float32 rounds each width of a pass differently by less
NARROW_TIES = {"bfloat16": 1 / 64, "float16": 1 / 256}  # of the largest logit


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
    position = first_difference(reference, other)
    if position is None:
        return None
    ids = [answer[position] if position < len(answer) else None for answer in (reference, other)]
    if ids[0] is None or ids[1] is None:
        return Difference(prompt_index, repeat, position, ids[0], ids[1], None, FLOAT32_TIE)
    row = pair.reference_logits(prompt_ids, reference[:position])
    gap = float(row[ids[0]] - row[ids[1]])
    return Difference(prompt_index, repeat, position, ids[0], ids[1], gap, tie_below(pair.target.dtype_name, float(row.max())))


def tie_below(dtype: str, largest: float) -> float:
    """The gap between two logits that rounding explains, where the largest of the row is `largest`."""
    return NARROW_TIES[dtype] * abs(largest) if dtype in NARROW_TIES else FLOAT32_TIE
