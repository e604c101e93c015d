"""How much faster is PEARL than drafting before each target pass? Prints a table in Markdown, by
the models' speed ratio and the share of drafted tokens that are accepted.

    python tests/bench/simulate_pearl.py [--target-slowdown A] [--draft-slowdown B]

The rounds are those of `pearl` and `sd` themselves, on models whose outputs are known: the draft
model's token is the target's with the same probability everywhere. Each pass is then priced: a
target pass counts as 1, whatever the number of its tokens, and a draft pass as 1 / c. PEARL's
window is c (Theorem 1); `sd` has the length that is best for both numbers. A slowdown is the time
of a pass beside the other model over its time alone, as `specgen inspect --measure` shows them; 1:
each model has a device of its own. What starting and ending a round takes is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from random import Random

import torch

from specgen.base.types import Context, Round, SamplingParams
from specgen.engine.forward_pass import ModelOutput
from specgen.testing.enumeration import InlineWorker
from specgen.testing.scripted_models import PROMPT, VOCAB, TableRunner, scripted_run

RATIOS = (1, 2, 3, 5, 8, 12)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = range(1, 25)  # of the drafts of `sd`
TOKENS = 2000
RIGHT = 0  # the target's token, at each position
WRONG = 1


class AgreeingRunner(TableRunner):
    """A model whose next token is the target's with the probability `acceptance`, decided for each
    position of the text."""

    context_limit = 1 << 40

    def __init__(self, acceptance: float) -> None:
        super().__init__(seed=0)
        random = Random(acceptance)
        longest = len(PROMPT) + 2 * TOKENS
        self._is_right = [random.random() < acceptance for _ in range(longest)]

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        rows = torch.zeros(len(draft) + 1 - start, VOCAB)
        for row in range(len(rows)):
            is_right = self._is_right[len(context) + start + row]
            rows[row, RIGHT if is_right else WRONG] = 10.0
        return ModelOutput(rows, rows)


@cache
def tokens_a_round(method: str, setting: str, size: int, acceptance: float) -> float:
    """Returns the mean number of output tokens of a round after the prompt's."""
    draft = AgreeingRunner(acceptance)
    run = scripted_run(
        method,
        {setting: size},
        AgreeingRunner(1.0),
        draft,
        SamplingParams(max_new_tokens=TOKENS),
        worker=InlineWorker(draft),
    )
    rounds: list[Round] = [round_ for round_ in run.rounds() if round_.mode != "prefill"]
    return sum(len(round_.token_ids) for round_ in rounds) / len(rounds)


def in_turn(ratio: float, acceptance: float) -> float:
    """Returns the tokens of `sd` in the time of a target pass, with the best length."""
    return max(
        tokens_a_round("sd", "k", length, acceptance) / (1 + length / ratio) for length in LENGTHS
    )


def overlapping(ratio: int, acceptance: float, slowdowns: Sequence[float]) -> float:
    """Returns the tokens of PEARL in the time of a target pass that no other pass slows down."""
    of_target, of_draft = slowdowns
    seconds = max(of_target, of_draft)  # the window's draft passes take as long as a target pass
    return tokens_a_round("pearl", "window", ratio, acceptance) / seconds


def table(slowdowns: Sequence[float]) -> list[str]:
    """Returns the lines of a table: PEARL's speed over that of `sd`, and in parentheses PEARL's
    over plain decoding's."""
    heading = " | ".join(f"{acceptance:.0%}" for acceptance in ACCEPTANCES)
    lines = [f"c | {heading}", "---|" * len(ACCEPTANCES) + "---"]
    for ratio in RATIOS:
        cells = []
        for acceptance in ACCEPTANCES:
            speed = overlapping(ratio, acceptance, slowdowns)
            gain = speed / max(1.0, in_turn(ratio, acceptance))
            cells.append(f"{gain:.2f} ({speed:.2f})")
        lines.append(f"{ratio} | {' | '.join(cells)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-slowdown", type=float, default=1.0)
    parser.add_argument("--draft-slowdown", type=float, default=1.0)
    given = parser.parse_args()
    print("\n".join(table((given.target_slowdown, given.draft_slowdown))))


if __name__ == "__main__":
    main()
