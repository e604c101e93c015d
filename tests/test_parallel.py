"""PEARL's schedule on scripted models: the tokens it commits, the rounds it reports and its
counts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.base.types import Draft, Round, SamplingParams
from specgen.decoding.parallel import Parallel, _joined
from specgen.decoding.parallel_costs import Window
from specgen.decoding.policy_base import DraftedToken, Fixed
from specgen.pair.records import round_line
from specgen.testing.scripted_models import TableRunner, ids_of, scripted_run
from specgen.workers.worker import DraftWorker, WorkerDrafter


class RandomRunner(TableRunner):
    """A runner whose logits depend on the last token alone; a share `noise` of them differs from a
    noiseless one's."""

    def __init__(self, vocabulary: int, seed: int, noise: float = 0.0) -> None:
        self.vocab_size = self.num_embeddings = vocabulary
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator)
        other = torch.randn(vocabulary, vocabulary, generator=generator)
        changed = torch.rand(vocabulary, 1, generator=generator) < noise
        self.table = torch.where(changed, other, self.table)

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-1]]


def decode(
    name: str,
    target: RandomRunner,
    draft: RandomRunner,
    limit: int,
    eos: set[int],
    flexible: Window | None = None,
    **given_: object,
) -> list[Round]:
    with closing(DraftWorker.in_this_process(draft)) as worker:  # type: ignore[arg-type]
        run = scripted_run(
            name,
            given_,
            target,
            draft,
            SamplingParams(max_new_tokens=limit),
            eos=eos,
            worker=worker,
            prompt=[0, 1],
        )
        if flexible is not None:
            assert isinstance(run.schedule, Parallel)
            run.schedule = replace(run.schedule, window=flexible)
            rng = random.Random(0)
            worker.ready()._server.show = lambda position, token: rng.random() < 0.8  # type: ignore[method-assign, union-attr]
        rounds = list(run.rounds())
    assert run.finish_reason in ("length", "eos")
    return rounds


@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    window=st.integers(1, 8),
    lead=st.none() | st.integers(0, 5),
    limit=st.integers(1, 20),
    eos=st.sets(st.integers(0, 8), max_size=2),
    verify=st.tuples(st.booleans(), st.booleans()),
    policy=st.sampled_from([None, "fixed", "heuristic", "svip", "beta-ts", "adaptive"]),
)
def test_random_cases_give_plain_decodings_tokens(
    vocabulary: int,
    seed: int,
    noise: float,
    window: int,
    lead: int | None,
    limit: int,
    eos: set[int],
    verify: tuple[bool, bool],
    policy: str | None,
) -> None:
    """Also with a flexible window (`lead` not None), however long the drafts are when the target's
    passes end."""
    target = RandomRunner(vocabulary, seed)
    draft = RandomRunner(vocabulary, seed, noise)
    pre, post = verify if lead is None else (True, True)
    given_: dict[str, object] = {
        "window": window + (lead or 0),
        "pre_verify": pre,
        "post_verify": post,
    }
    given_ |= {} if policy is None else {"policy": policy}
    flexible = None if lead is None else Window(window, window, lead, is_flexible=True)
    rounds = decode("pearl", target, draft, limit, eos, flexible, **given_)
    assert ids_of(rounds) == ids_of(decode("ar", target, draft, limit, eos))
    for round_ in rounds[1:]:
        assert round_.token_ids, "every pass of the target commits something"
        assert len(round_.draft.tokens) == len(round_.draft.entropies) == len(round_.statuses)
        if lead is None:
            assert round_.verdict.source != "bonus" or not post, (
                "never a bonus where the next tokens are there already"
            )
            assert len(round_.draft.tokens) <= 2 * window


def test_each_drafted_token_stands_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in no other: the rounds hold exactly the tokens that the drafter proposed."""
    made: list[int] = []
    finish = WorkerDrafter.finish

    def noted(self: WorkerDrafter) -> object:
        draft = finish(self)
        made.extend(draft.tokens)
        return draft

    monkeypatch.setattr(WorkerDrafter, "finish", noted)
    for seed in range(8):
        for flexible in (None, Window(4, 4, 2, is_flexible=True)):
            made.clear()
            rounds = decode(
                "pearl",
                RandomRunner(8, seed),
                RandomRunner(8, seed, 0.3),
                30,
                {5},
                flexible,
                window=4,
            )
            assert [token for round_ in rounds for token in round_.draft.tokens] == made


def test_rounds_as_in_the_papers_figure_3() -> None:
    """x1 is rejected in pre-verify; x4 to x6 are accepted while x7 to x9 are drafted; x9 and what
    follows it is rejected."""
    target = RandomRunner(16, 0)
    draft = RandomRunner(16, 0)
    target.table[:] = torch.eye(16).roll(1, 1)  # counts up: 0 1 2 3 ...
    draft.table[:] = target.table
    draft.table[2] = torch.eye(16)[9]  # after 2, the first token of the run, it drafts 9
    draft.table[8] = torch.eye(16)[0]
    rounds = decode("pearl", target, draft, 11, set(), window=3)
    shown = [
        (round_.mode, list(round_.draft.tokens), len(round_.verdict.path), round_.verdict.token)
        for round_ in rounds
    ]
    assert shown == [
        ("prefill", [], 0, 2),
        ("pre-verify", [9, 10, 11], 0, 3),
        ("pre-verify", [4], 1, None),
        ("post-verify", [5, 6, 7], 3, None),
        ("post-verify", [8, 0, 1, 2, 9], 1, 9),
        ("pre-verify", [10], 1, None),
        ("post-verify", [11, 12], 2, None),
    ]


class Predicting(Fixed):
    """Predicts 0.1 for the first token of a draft, 0.2 for the second, and so on."""

    def starts_draft(self, **_: object) -> bool:
        self.predictions: list[float] = []
        return True

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.predictions.append(token.position / 10)
        return super().keep_drafting(token)


def test_each_judged_token_has_its_prediction() -> None:
    """Also where a round judges parts of two drafts. A token that ends its draft without the policy
    has none."""
    runner = RandomRunner(8, 0)
    run = scripted_run("sd", {"k": 4}, runner, runner, SamplingParams(max_new_tokens=30), eos={1})
    for round_ in replace(run, policy=Predicting(4)).rounds():
        wanted = [
            None if token == 1 else position / 10
            for position, token in enumerate(round_.draft.tokens, 1)
        ]
        assert round_line(round_, str)["predicted"] == (wanted if wanted != [None] else [])
    first = Draft.chain([1, 2])
    second = Draft.chain([3]).with_predictions([0.5])
    assert [math.isnan(share) for share in _joined(first, second).predicted] == [True, True, False]
    assert [math.isnan(share) for share in _joined(second, first).predicted] == [False, True, True]
    assert (_joined(first, first).predicted, _joined(second, first).part(0, 1).predicted) == (
        [],
        [0.5],
    )


@pytest.mark.parametrize("window", [2, 3, 8])
def test_no_token_is_drafted_beyond_the_limit_or_an_end_of_sequence(window: int) -> None:
    """Tokens pending verification count as drafted. The models agree, so the first end-of-sequence
    is the output's."""
    runner = RandomRunner(12, 0)  # its first seven tokens differ
    rounds = decode("pearl", runner, runner, 6, set(), window=window)
    assert sum(len(round_.draft.tokens) for round_ in rounds) == 5
    tokens = ids_of(decode("ar", runner, runner, 12, set()))
    for position in range(1, 7):
        ended = decode("pearl", runner, runner, 12, {tokens[position]}, window=window)
        assert [token for round_ in ended for token in round_.draft.tokens] == tokens[
            1 : position + 1
        ]
