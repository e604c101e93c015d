"""Decides whether a method's greedy output equals plain decoding's. The token ids must be equal,
except where the target's logits of the two different tokens are equal within rounding (a tie)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specgen.base.text import significant

if TYPE_CHECKING:
    from specgen.pair.pair import Pair

FLOAT32_TIE = 1e-3  # logits
_NARROW_TIES = {"bfloat16": 1 / 64, "float16": 1 / 256}  # as fractions of the largest logit
# Over bfloat16 passes of 1 and of 8 tokens, the gap between a token's two best logits changed by up
# to 0.071 of the largest logit in 8 random mixtures of 12 layers (512 tokens; 3 % of the choices of
# experts differed), and by up to 0.015 in dense models.
_EXPERTS_FACTOR = 5
# from best to worst; JSON and CSV count prompts under these keys
OUTCOMES = ("identical", "tied", "diverged")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a method's output first differs from plain decoding's (the reference): the first
    `position` tokens are equal.

    `reference_id` and `token_id` are the two different tokens, None for an output that ends there.
    `gap` is the target's logit of `reference_id` minus that of `token_id`, None if an output ends.
    If the absolute gap is below `threshold`, the difference is a tie.
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
        """Whether rounding does not explain the difference. A lossless method must not have such a
        difference."""
        return self.gap is None or not abs(self.gap) < self.threshold

    def as_dict(self) -> dict[str, Any]:
        """The fields for the JSON output, `position` as `place`, and `tie`: whether rounding
        explains the difference. The keys are documented and do not change."""
        fields = asdict(self)
        return {"place": fields.pop("position"), **fields, "tie": not self.is_broken}

    def explanation(self, methods: str, prompt: str) -> str:
        """A sentence that says where the output of `methods` differs from plain decoding's on
        `prompt`, and whether rounding explains it. Both arguments are names to print."""
        where = f"{methods} differs from plain decoding at {self.position} of {prompt}"
        if self.gap is None:
            return f"{where}: one answer ends there, and the other does not."
        if not self.is_broken:
            where = f"tie at {self.position} of {prompt} ({methods})"
        gap = significant(abs(self.gap), 2)
        explained = significant(self.threshold, 2)
        return f"{where}: the two tokens' logits are {gap} apart; rounding explains {explained}."


def count_outcomes(prompts: int, differences: Sequence[Difference]) -> dict[str, int]:
    """Counts how many of `prompts` prompts have each outcome in `OUTCOMES` (identical, tied,
    diverged). A prompt counts once, with the worst outcome among its repeats."""
    broken = {difference.prompt_index for difference in differences if difference.is_broken}
    tied = {difference.prompt_index for difference in differences} - broken
    counts = (prompts - len(broken) - len(tied), len(tied), len(broken))
    return dict(zip(OUTCOMES, counts, strict=True))


def outcome_text(differences: Sequence[Difference]) -> str:
    """The worst outcome as the text of a table cell: `same`, `tie at 57` (a token position), `2
    ties`, `2 differ` (numbers of prompts)."""
    broken = [difference for difference in differences if difference.is_broken]
    worst = broken or differences
    if not worst:
        return "same"
    count = len({difference.prompt_index for difference in worst})
    if count > 1:
        return f"{count} differ" if broken else f"{count} ties"
    return f"{'differs' if broken else 'tie'} at {worst[0].position}"


def judge(
    pair: Pair,
    prompt_index: int,
    repeat: int,
    prompt_ids: Sequence[int],
    reference: Sequence[int],
    other: Sequence[int],
    *,
    exact: bool = False,
    dtype: str | None = None,
) -> Difference | None:
    """Compares a method's output `other` with plain decoding's `reference` for the same prompt (all
    are token ids). Returns None if they are equal.

    Unless one of the outputs ends at the first difference, one forward pass of the target without a
    key-value cache computes the logits of the two tokens there. `exact`: all passes give logits
    with equal bits, so no difference counts as a tie. `dtype` names that of the method's
    computations; None: the target's. `repeat` and `prompt_index` only name the run.
    """
    if list(reference) == list(other):
        return None
    shorter = min(len(reference), len(other))
    position = next(
        (number for number in range(shorter) if reference[number] != other[number]), shorter
    )
    reference_id, token_id = (
        answer[position] if position < len(answer) else None for answer in (reference, other)
    )
    if reference_id is None or token_id is None:
        return Difference(prompt_index, repeat, position, reference_id, token_id, None, FLOAT32_TIE)
    logits = pair.target.reference_logits(prompt_ids, reference[:position])
    gap = float(logits[reference_id] - logits[token_id])
    threshold = 0.0
    if not exact:
        has_experts = pair.target.files.experts is not None
        largest = float(logits.max())
        dtypes = dict.fromkeys((pair.target.dtype_name, dtype or pair.target.dtype_name))
        threshold = max(tie_threshold(own, largest, has_experts=has_experts) for own in dtypes)
    return Difference(prompt_index, repeat, position, reference_id, token_id, gap, threshold)


def tie_threshold(dtype: str, largest: float, *, has_experts: bool = False) -> float:
    """Returns the difference below which two logits of one token position count as equal, because
    rounding may have swapped them.

    Two passes over different numbers of tokens round differently: by less than 1e-3 in float32, in
    16-bit dtypes in proportion to `largest`, the largest logit of the position. With `has_experts`
    (a mixture of experts) the difference in 16-bit dtypes is larger, because other experts may then
    run the token.
    """
    if dtype not in _NARROW_TIES:
        return FLOAT32_TIE
    return _NARROW_TIES[dtype] * abs(largest) * (_EXPERTS_FACTOR if has_experts else 1)
