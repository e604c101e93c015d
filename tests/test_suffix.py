"""Drafts of `suffix`: its index of n-grams against a search of all positions, its limits, and its
history of earlier outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Round, SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.decoding.policy_base import Fixed
from specgen.methods.suffix_drafts import (
    LONGEST_MATCH,
    MOST_OCCURRENCES,
    Continuation,
    SuffixDrafter,
    SuffixHistory,
    SuffixIndex,
)
from specgen.pair.pair import Pair
from specgen.tune.outcome import grid, is_simple

PROMPT = [3, 5, 4, 9]
BORDER = -1
Found = tuple[int, list[int], list[float]]


def searched(ids: Sequence[int], end: Sequence[int], tokens: int) -> Found | None:
    """The match's length, and at most so many tokens after it with their probabilities, found by
    looking at all positions.

    `ids` are the indexed tokens, `end` the last ones of the context.
    """

    def equal(position: int) -> int:
        most = min(position, len(end), LONGEST_MATCH)
        return next(
            (length for length in range(most) if ids[position - 1 - length] != end[-1 - length]),
            most,
        )

    places = [
        (equal(position), position) for position in range(1, len(ids)) if ids[position] != BORDER
    ]
    gram = min(3, max((length for length, _ in places), default=0))
    if not gram:
        return None
    latest = [(length, position) for length, position in reversed(places) if length >= gram][
        :MOST_OCCURRENCES
    ]
    match = max(length for length, _ in latest)
    positions = [position for length, position in latest if length == match]
    found = list[int]()
    probs = list[float]()
    for step in range(tokens):
        following = [[*ids, *found][position + step] for position in positions]
        counts = Counter(token for token in following if token != BORDER)
        if not counts:
            break
        token = next(token for token in following if counts[token] == max(counts.values()))
        odds = 0.45 * (match + step) * counts[token] / (counts.total() - counts[token] + 1)
        positions = [
            position for position, other in zip(positions, following, strict=True) if other == token
        ]
        found.append(token)
        probs.append(odds / (1 + odds))
    return match, found, probs


def drafted(found: Continuation | None, tokens: int) -> Found | None:
    if found is None:
        return None
    while len(found.tokens) < tokens and found.extend():
        pass
    return found.match_length, found.tokens, found.probs


@settings(max_examples=100, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 5), shortest=st.sampled_from([1, 1, 2, 3, 5]))
def test_the_index_finds_what_a_search_of_all_positions_finds(
    data: st.DataObject, alphabet: int, shortest: int
) -> None:
    """The context is in the index, which grows with it; its own end is no match."""
    index = SuffixIndex(shortest)
    ids = list[int]()
    block = st.lists(st.integers(0, alphabet - 1), max_size=40)
    for _ in range(4):
        added = data.draw(block)
        ids += added * data.draw(st.integers(1, 2))
        index.extend(ids[len(index) :])
        expected = searched(ids, ids, 6)
        if expected is not None and expected[0] < shortest:
            expected = None
        assert drafted(index.find(ids), 6) == expected
        if ids:
            assert index.repeats or expected is None


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=4),
    end=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_stored_outputs_match_within_their_borders(
    outputs: list[list[int]], end: list[int]
) -> None:
    history = SuffixHistory()
    for output in outputs:
        history.add(output)
    ids = [token for output in outputs for token in (*output, BORDER)]
    assert drafted(history.index.find(end), 6) == searched(ids, end, 6)


def test_a_history_keeps_its_budget() -> None:
    history = SuffixHistory(40)
    budget = 40
    for first in range(0, 300, 10):
        history.add(range(first, first + 8))
        assert len(history.index) <= budget
        assert drafted(history.index.find([first]), 9)[1] == list(range(first + 1, first + 8))  # type: ignore[index]
    assert history.index.find([0]) is None
    history.add(range(1000, 1100))  # more than the budget: its last tokens are kept
    assert len(history.index) <= budget
    assert history.index.find([1060]) is None
    assert drafted(history.index.find([1061]), 100)[1] == list(range(1062, 1100))  # type: ignore[index]
    history.clear()
    assert len(history.index) == 0


def propose(
    ids: Sequence[int], limit: int = 20, *, eos: int = -2, **given: float
) -> tuple[list[int], str | None]:
    chosen = {"min_prob": 0.0, "factor": 10.0} | given
    draft = SuffixDrafter(frozenset({eos}), **chosen).propose(Context(ids), Fixed(99), limit)
    return list(draft.tokens), draft.stop_reason


def test_a_draft_ends_at_each_limit() -> None:
    text = [*range(1, 30), 1, 2]
    assert propose(text) == ([*range(3, 23)], "length")
    assert propose(text, factor=2) == ([3, 4, 5, 6], "match of 2")
    assert propose(text, factor=0.4) == ([], "match of 2")
    assert propose(text, eos=5) == ([3, 4, 5], "eos")
    assert propose(text, min_prob=0.25) == ([3, 4], "path 0.17 < 0.25"), (
        "0.474, then times 0.574, then times 0.643"
    )
    assert propose([1, 2, 3]) == ([], None)
    assert propose(text, 0) == ([], None)
    assert propose([1, 2, 1, 2], 6) == ([1, 2, 1, 2, 1, 2], "length"), "a copy of its own tokens"


def rounds_of(pair: Pair, sampling: SamplingParams, **given: Any) -> list[Round]:
    return pair.generate(PROMPT, "suffix", sampling, policy="fixed", **given).rounds


def drafts(rounds: Sequence[Round]) -> list[list[int]]:
    return [list(round_.draft.tokens) for round_ in rounds]


def test_only_with_history_a_run_copies_earlier_outputs(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    pair.forget()
    plain = pair.generate(PROMPT, "ar", sampling)
    first = rounds_of(pair, sampling)
    assert drafts(rounds_of(pair, sampling)) == drafts(first), "by default nothing is kept"
    before = rounds_of(pair, sampling, history=True)
    after = rounds_of(pair, sampling, history=True)
    assert drafts(before) == drafts(first)
    assert len(after) < len(before)
    assert [token for round_ in after for token in round_.token_ids] == plain.token_ids
    pair.forget()
    assert drafts(rounds_of(pair, sampling, history=True)) == drafts(before), "measurements forget"
    pair.forget()


def test_no_measurement_has_a_history(near: Pair) -> None:
    """Neither `compare` nor `tune`; and a seed decides all tokens of a sampled run."""
    with pytest.raises(
        SpecgenError,
        match=r"^suffix:history=true would copy its own earlier outputs\. Leave history out",
    ):
        parse_spec("suffix:history=true")
    assert parse_spec("suffix:history=false").name == "suffix"
    assert is_simple("suffix")
    assert not any("history" in given for given in grid("suffix"))
    pair = near
    sampled = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1)
    with pytest.raises(SpecgenError, match=r"same seed.*Leave the seed or history out"):
        pair.run(pair.request([3, 5], "suffix", sampled, history=True, policy="fixed"))


def test_a_history_is_cleared_by_its_owner_and_follows_turns() -> None:
    """An output is added when the next run begins, as far as it has got."""
    history = SuffixHistory()
    contexts = [Context([1]), Context([1]), Context([1])]
    history.begin(contexts[0])
    contexts[0].extend([2, 3])
    history.begin(contexts[1])
    contexts[0].extend([4])
    contexts[1].extend([5, 6])
    history.begin(contexts[2])
    assert [drafted(history.index.find([token]), 5) is not None for token in (1, 2, 3, 5, 6)] == [
        False,
        True,
        False,
        True,
        False,
    ]
