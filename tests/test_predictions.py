"""Predicted acceptance probabilities in rounds, from the length policy to the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from enumeration import InlineWorker
from scripted_models import TableRunner, scripted_run

from specgen.base.types import Draft, SamplingParams
from specgen.decoding.policy import NO_SIGNALS, DraftedToken, Fixed
from specgen.methods.pearl import _joined
from specgen.pair.records import round_line

GREEDY = SamplingParams(max_new_tokens=30)


class Predicting(Fixed):
    """Predicts 0.1 for the first token of a draft, 0.2 for the second, and so on."""

    def starts_draft(self, *, unverified: int = 0, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        self.predictions: list[float] = []
        return True

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.predictions.append(token.position / 10)
        return super().keep_drafting(token)


def test_each_judged_token_has_its_prediction() -> None:
    """A token that ends its draft without the policy, such as the end-of-sequence token, has none."""
    ended = 0
    for seed in range(6):
        run = scripted_run("sd", {"k": 4}, TableRunner(seed), TableRunner(seed), GREEDY, eos={1})
        for round_ in replace(run, policy=Predicting(4)).rounds():
            draft, line = round_.draft, round_line(round_, str)
            expected = [None if token == 1 else position / 10 for position, token in enumerate(draft.tokens, 1)]
            assert line["predicted"] == (expected if expected != [None] else [])
            ended += None in expected
    assert ended, "no draft ended with the end-of-sequence token"


def test_pearl_reports_the_predictions_of_drafts_in_parts() -> None:
    runner = TableRunner(0)
    run = scripted_run("pearl", {"window": 3}, runner, runner, GREEDY, worker=InlineWorker(runner))  # type: ignore[arg-type]
    drafter: Any = run.schedule.drafter  # type: ignore[attr-defined]
    drafter.policy = Predicting(9)
    rounds = [round_ for round_ in run.rounds() if round_.draft.tokens]
    assert all(len(round_.draft.predicted) == len(round_.draft.tokens) for round_ in rounds)
    assert {share for round_ in rounds[1:-1] for share in round_.draft.predicted} == {0.1, 0.2, 0.3}
    first, second = Draft.chain([1, 2]), Draft.chain([3]).with_predictions([0.5])
    assert [math.isnan(share) for share in _joined(first, second).predicted] == [True, True, False]
    assert [math.isnan(share) for share in _joined(second, first).predicted] == [False, True, True]
    assert (_joined(first, first).predicted, _joined(second, first).part(0, 1).predicted) == ([], [0.5])
