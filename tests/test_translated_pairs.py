"""A draft model with another tokenizer: every drafter and PEARL give the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from runner_checks import every
from translated_pairs import DRAFTS

import specgen
from specgen import demo
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.pair.pair import Pair, runners

METHODS = [
    *("sd:k=4", "heuristic", "confidence", "svip", "adaptive:draft_cost=0.1:verify_cost=0.05", "beta-ts"),
    *("sd:width=3:depth=3", "sd:width=3:nodes=6", "sd:k=3:cape=true", "spectr:drafts=2", "specinfer:drafts=3"),
    *("ouroboros", "pearl:window=3", "pearl:window=2:pre_verify=false", "pearl:window=2:post_verify=false"),
    *("mtad:tau=1", "bild:rollback=0:fallback=0"),
]
PROMPTS = [
    "Once upon a time there was a little",
    "def add(a, b):\n\treturn a + b\n\n\n  # d\u00e9j\u00e0 vu \u65e5\u672c \U0001f600\n",
    "User: What is 12 + 34?\nAssistant: 46</s> <pad>\nUser: and",
]
COUNT = 10


@pytest.fixture(scope="session")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def made(kind: str) -> Pair:
        folder = DRAFTS[kind](tmp_path_factory.mktemp("translated") / kind)
        pair = specgen.load(str(demo.folder("target")), str(folder), device="cpu", dtype="float32")
        pair._worker = None  # PEARL drafts in a thread
        return pair

    return made


def run(pair: Pair, method: str, prompt: Any, **sampling: Any) -> Any:
    name, *given = method.split(":")
    return pair.generate(prompt, name, SamplingParams(**{"max_new_tokens": COUNT} | sampling), **dict(parse_pairs(given)))


@pytest.mark.parametrize(
    ("method", "kind"), [(method, ("merges", "sentencepiece")[number % 2]) for number, method in enumerate(METHODS)]
)
def test_greedy_ids_are_the_targets_own(translated: Callable[[str], Pair], demo_pair: Pair, method: str, kind: str) -> None:
    pair = translated(kind)
    prompt = PROMPTS[((kind == "merges") + METHODS.index(method)) % len(PROMPTS)]
    wanted = run(demo_pair, "ar", prompt).token_ids
    result = run(pair, method, prompt)
    assert result.token_ids == wanted
    assert result.summary["drafted"] > 0


@pytest.mark.parametrize("method", every(2, METHODS))
def test_a_permuted_vocabulary_changes_no_draft(translated: Callable[[str], Pair], demo_pair: Pair, method: str) -> None:
    for prompt, sampling in (PROMPTS[2], {}), (PROMPTS[0], {"temperature": 0.7, "top_p": 0.9}):
        if method.startswith("ouroboros") and sampling:
            continue  # it draws tokens of its window from the ids at random
        ours, theirs = (run(pair, method, prompt, seed=5, **sampling) for pair in (translated("permuted"), demo_pair))
        assert ours.token_ids == theirs.token_ids
        assert [list(round_.draft.tokens) for round_ in ours.rounds] == [list(round_.draft.tokens) for round_ in theirs.rounds]
        drafted = [(round_.draft.entropies, round_.draft.top_probs) for round_ in ours.rounds]
        wanted = [(round_.draft.entropies, round_.draft.top_probs) for round_ in theirs.rounds]
        for found, expected in zip(drafted, wanted, strict=True):
            assert list(found[0]) == pytest.approx(list(expected[0]), rel=1e-4)
            assert list(found[1]) == pytest.approx(list(expected[1]), rel=1e-4)


def test_the_drafts_context_limit_is_counted_in_its_own_tokens(
    translated: Callable[[str], Pair], demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = translated("merges")
    runner = runners(pair)[1]
    assert isinstance(runner, TranslatedRunner)
    prompt = demo_pair.tokenizer.encode(PROMPTS[1] * 2)
    own = runner._translated(Context(prompt))
    assert len(own) > len(prompt) + 3, "the draft needs more tokens for this text"
    monkeypatch.setattr(runner.own, "context_limit", len(own) + 3)
    for method in ("sd:k=6", "sd:width=2:depth=6", "pearl:window=3", "ouroboros", "specinfer:drafts=2"):
        result = run(pair, method, prompt)
        assert result.token_ids == run(demo_pair, "ar", prompt).token_ids
        levels = [round_.draft.levels for round_ in result.rounds]
        assert levels[-1] == 0, "no draft fits any more"
        assert max(levels) <= (6 if method.startswith(("pearl", "ouroboros")) else 3)
