"""Threads that share a pair of models: calls wait for one another, and unfinished runs keep nobody
waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, cast

import pytest

from specgen.base.types import SamplingParams
from specgen.decoding.run import Turns
from specgen.pair.pair import Pair

PROMPTS = ([5, 9, 7, 3], [8, 6, 6, 1], [4, 4, 4])
METHODS = ("ar", "sd", "adaptive", "pearl", "selfsd")
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONGEST = 60.0  # seconds


@pytest.fixture
def slow(near: Pair) -> Pair:
    """A pair whose target lets other threads run in the middle of each pass."""
    runner: Any = near.models._target_runner
    forward = runner._forward

    def waiting(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.001)
        return forward(*args, **kwargs)

    runner._forward = waiting
    return near


def settings_of(method: str) -> dict[str, Any]:
    return {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}.get(method, {})


def at_once(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `work` in threads of their own, with one argument each, and returns the results in
    order."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        return [
            future.result(LONGEST)
            for future in [threads.submit(work, argument) for argument in arguments]
        ]


@pytest.mark.parametrize("method", METHODS)
def test_threads_that_call_one_pair_get_their_own_tokens(slow: Pair, method: str) -> None:
    def tokens(prompt: list[int]) -> list[int]:
        return slow.generate(prompt, method, SAMPLING, **settings_of(method)).token_ids

    def tokens_of_rounds(prompt: list[int]) -> list[int]:
        rounds = slow.rounds(prompt, method, SAMPLING, **settings_of(method))
        return [token for round_ in rounds for token in round_.token_ids]

    expected = [slow.generate(prompt, "ar", SAMPLING).token_ids for prompt in PROMPTS]
    assert at_once(tokens, *PROMPTS) == expected
    assert at_once(tokens_of_rounds, *PROMPTS) == expected


@pytest.mark.parametrize("method", METHODS)
def test_an_unfinished_run_keeps_no_thread_waiting(slow: Pair, method: str) -> None:
    first, second, third = PROMPTS
    expected = [slow.generate(prompt, "ar", SAMPLING).token_ids for prompt in PROMPTS]
    rounds = slow.rounds(first, method, SAMPLING, **settings_of(method))
    begun = [token for round_ in islice(rounds, 2) for token in round_.token_ids]

    def others(prompt: list[int]) -> list[int]:
        slow.forget()
        return slow.generate(prompt, method, SAMPLING, **settings_of(method)).token_ids

    assert at_once(others, second) == [expected[1]]
    assert others(third) == expected[2], "a call of the same thread"
    rest = [token for round_ in rounds for token in round_.token_ids]
    assert begun + rest == expected[0]


@pytest.mark.parametrize("method", METHODS)
def test_an_unfinished_run_that_is_dropped_while_another_thread_has_the_turn_waits_for_nothing(
    near: Pair, method: str
) -> None:
    rounds: Any = near.rounds(PROMPTS[0], method, SAMPLING, **settings_of(method))
    list(islice(rounds, 2))
    with ThreadPoolExecutor(1) as thread:
        with near.lock:
            dropped = thread.submit(rounds.close)
            done, _ = wait([dropped], 5)  # the garbage collector does so in any thread
        assert dropped in done
        dropped.result()
    expected = near.generate(PROMPTS[1], "ar", SAMPLING).token_ids
    assert near.generate(PROMPTS[1], method, SAMPLING, **settings_of(method)).token_ids == expected


def test_what_was_dropped_is_closed_at_the_beginning_of_the_next_turn() -> None:
    ended = []

    def unfinished() -> Iterator[Any]:
        try:
            yield 1
        finally:
            ended.append(True)

    turns = Turns()
    rounds = cast("Generator[Any]", unfinished())
    next(rounds)
    with ThreadPoolExecutor(1) as thread, turns:
        thread.submit(turns.close, rounds).result(LONGEST)
        with turns:
            assert not ended, "a part of this turn"
    with turns:
        assert ended


def test_calls_have_the_turn_while_they_work(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []

    def note(*_: object) -> float:
        depths.append(near.lock._depth)
        return 0.0

    for name in ("forget", "log_likelihood", "reserve"):
        monkeypatch.setattr(near.models, name, note)
    near.forget()
    near.log_likelihood(PROMPTS[1], PROMPTS[2])
    near.reserve(8)
    assert depths == [1, 1, 1]


def test_measuring_and_forgetting_wait_for_a_run(slow: Pair) -> None:
    def generated(_: object) -> list[int]:
        return slow.generate(PROMPTS[0], "sd", SAMPLING).token_ids

    def likelihood(_: object) -> float:
        return slow.log_likelihood(PROMPTS[1], PROMPTS[2])

    def forget(_: object) -> None:
        for _turn in range(20):
            slow.forget()
            time.sleep(0.001)

    expected = generated(None)
    likely = likelihood(None)
    calls = (generated, likelihood, forget, generated, likelihood)
    found = at_once(lambda call: call(None), *calls)
    assert found[0] == found[3] == expected
    assert found[1] == pytest.approx(likely, abs=1e-3)
    assert found[4] == pytest.approx(likely, abs=1e-3)
