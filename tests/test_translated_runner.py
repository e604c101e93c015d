"""A draft model with another tokenizer: its runner's logits and contexts, and the target's exact
distribution and own tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_helpers import draft_here, runners
from runner_checks import every, path_to, random_tree
from tokenizer_helpers import LLAMA, load, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers
from translated_pairs import DRAFTS

import specgen
from specgen import demo
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.engine.penalties import GenerationConfig, PenaltyProcessor
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT, ROUNDING, Case, SmallRunner, distance

TARGET = {"a": 0, "b": 1, "ab": 2}
# token 2 is the target's `a`, too; it lacks `ab`, and the target lacks `c`
DRAFT = {"b": 0, "a": 1, "<0x61>": 2, "c": 3}
END = "</s>"


def tokenizer(
    folder: Path, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """Like SentencePiece's, without a space before the text."""
    pipeline = Pipeline(models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ends = [end for end in (END, "<end>") if end in vocabulary]
    named = {"eos_token": ends[0]} if ends else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    return load(write(folder, pipeline.to_str(), settings, LLAMA))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    folder = tmp_path_factory.mktemp("small")
    return Translation(
        tokenizer(folder / "target", TARGET, [("a", "b")]), tokenizer(folder / "draft", DRAFT)
    )


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    """Between vocabularies with end-of-sequence tokens; the draft's has another id."""
    folder = tmp_path_factory.mktemp("ending")
    target = tokenizer(folder / "target", {"a": 0, "b": 1, END: 2})
    draft = tokenizer(folder / "draft", {"<end>": 0, "b": 1, "c": 2, "a": 3})
    return Translation(target, draft)


def runner_of(
    runner: Any, translation: Translation, penalties: PenaltyProcessor | None = None
) -> TranslatedRunner:
    return TranslatedRunner(runner, translation, penalties)


def test_rows_are_the_restricted_distribution_and_the_whole_one(small: Translation) -> None:
    runner = SmallRunner(1, 4)
    output = runner_of(runner, small).logits(Context(PROMPT))
    q = runner.row(small.prompt(PROMPT)).softmax(dim=-1)
    common = torch.tensor([q[1] + q[2], q[0], 0.0])
    assert torch.allclose(output.logits[0].softmax(dim=-1), common / common.sum(), atol=1e-6)
    assert output.unrestricted is not None
    whole = output.unrestricted[0].softmax(dim=-1)
    assert torch.allclose(whole[:3], common, atol=1e-6)
    assert torch.allclose(whole[3:].sum(), q[3], atol=1e-6)
    assert output.logits.shape[1] == 3


def test_any_tree_has_the_rows_of_its_paths(small: Translation) -> None:
    """Also with tokens that the draft model lacks, which are run as several."""
    rng = random.Random(0)
    for seed in range(20):
        runner = SmallRunner(seed, 4)
        tokens = [rng.randrange(3) for _ in range(5)]
        parents = random_tree(rng, 5)[1]
        start = rng.randrange(5)
        rows = runner_of(runner, small).logits(Context(PROMPT), tokens, parents, start=start).logits
        for index in range(start, 6):
            context = Context(PROMPT)
            context.extend(path_to(tokens, parents, index - 1))
            assert torch.equal(
                rows[index - start], runner_of(runner, small).logits(context).logits[0]
            )


def test_penalties_apply_in_the_targets_ids(small: Translation) -> None:
    runner = SmallRunner(2, 4)
    config = GenerationConfig(repetition_penalty=1.5, suppress_tokens=[2])
    penalties = PenaltyProcessor(config, [], 3, torch.device("cpu"))
    context = Context([1, 1])  # in the draft's ids these are 0
    free = runner_of(runner, small).logits(context, [1])
    output = runner_of(runner, small, penalties).logits(context, [1])
    assert output.unpenalised is not None
    assert torch.equal(output.unpenalised, free.logits)
    assert torch.equal(output.logits, penalties(free.logits, context, [1], range(-1, 0), 0))
    assert not torch.equal(output.logits[:, 1], free.logits[:, 1])
    everything = PenaltyProcessor(
        GenerationConfig(suppress_tokens=[0, 1]), [], 3, torch.device("cpu")
    )
    nothing = runner_of(runner, small, everything).logits(context)
    assert torch.equal(nothing.logits, free.logits[:1]), (
        "without an allowed token, the target rejects the drafted one"
    )


SIZES = (3, 4)
CASES = [
    Case("sd", {"k": 2}, 4, SIZES, {"top_p": 0.8, "temperature": 1.3}),
    Case("sd", {"depth": 2, "width": 2}, 4, SIZES, {"top_k": 2}),
    Case("sd", {"k": 2, "cape": True}, 3, SIZES),
    Case("adaptive", {"draft_cost": 0.2, "verify_cost": 0.05, "lookup": False}, 3, SIZES),
    Case("spectr", {"k": 1, "drafts": 2}, 3, SIZES, eos=(2,)),
    Case("pearl", {"window": 3, "pre_verify": False}, 3, SIZES, {"top_k": 2}),
    Case("ouroboros", {"k": 1, "ngram": 2, "branches": 2, "window": 2}, 3, SIZES),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_is_exactly_the_targets(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    translation = request.getfixturevalue("ending" if case.eos else "small")
    assert distance(case, runner_of(case.models[1], translation)) < ROUNDING


def test_tokens_without_an_embedding_are_left_out(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than its model. Here the draft's usual `a` is one of them,
    and its byte token is not."""
    of_draft = tokenizer(tmp_path / "draft", {"b": 0, "<0x61>": 1, "c": 2, "a": 3})
    translation = Translation(tokenizer(tmp_path / "target", {"a": 0, "b": 1}), of_draft)
    runner = SmallRunner(1, 3)
    runner.table = runner.table[:3, :3]  # another token would be an index beyond it
    both = runner_of(runner, translation)
    assert both.logits(Context([1, 0, 1])).logits.softmax(dim=-1)[0, 0] > 0, "`a` can be drafted"
    assert both.logits(Context([1, 0, 1]), [0, 1], [-1, 0]).logits.shape == (3, 2)
    context = Context([1, 0, 1])
    context.extend([0])
    both.logits(context)


METHODS = [
    *(
        "sd:k=4",
        "heuristic",
        "confidence",
        "svip",
        "adaptive:draft_cost=0.1:verify_cost=0.05",
        "beta-ts",
    ),
    *(
        "sd:width=3:depth=3",
        "sd:width=3:nodes=6",
        "sd:k=3:cape=true",
        "spectr:drafts=2",
        "specinfer:drafts=3",
    ),
    *(
        "ouroboros",
        "pearl:window=3",
        "pearl:window=2:pre_verify=false",
        "pearl:window=2:post_verify=false",
    ),
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
        draft_here(pair)  # PEARL drafts in this process
        return pair

    return made


def run(pair: Pair, method: str, prompt: Any, **sampling: Any) -> Any:
    name, *given = method.split(":")
    return pair.generate(
        prompt,
        name,
        SamplingParams(**{"max_new_tokens": COUNT} | sampling),
        **dict(parse_pairs(given)),
    )


@pytest.mark.parametrize("method", every(2, METHODS))
def test_a_permuted_vocabulary_changes_no_draft(
    translated: Callable[[str], Pair], demo_pair: Pair, method: str
) -> None:
    for prompt, sampling in (PROMPTS[2], {}), (PROMPTS[0], {"temperature": 0.7, "top_p": 0.9}):
        if method.startswith("ouroboros") and sampling:
            continue  # it draws tokens of its window from the ids at random
        ours, theirs = (
            run(pair, method, prompt, seed=5, **sampling)
            for pair in (translated("permuted"), demo_pair)
        )
        assert ours.token_ids == theirs.token_ids
        assert [list(round_.draft.tokens) for round_ in ours.rounds] == [
            list(round_.draft.tokens) for round_ in theirs.rounds
        ]


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
    for method in (
        "sd:k=6",
        "sd:width=2:depth=6",
        "pearl:window=3",
        "ouroboros",
        "specinfer:drafts=2",
    ):
        result = run(pair, method, prompt)
        assert result.token_ids == run(demo_pair, "ar", prompt).token_ids
        levels = [round_.draft.levels for round_ in result.rounds]
        assert levels[-1] == 0, "no draft fits any more"
        assert max(levels) <= (6 if method.startswith(("pearl", "ouroboros")) else 3)
