"""Where a run ends and what it reports: limits, ends of sequence, stop texts, interruptions, second runs, Python's interface."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from families import BACKENDS, CONTEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_models import LENGTH_SETTINGS, PROMPT, VOCAB, TableRunner, ids_of, scripted_run

import specgen
from specgen.base.types import Round, SamplingParams
from specgen.engine.transformers.transformers_model import TransformersModel
from specgen.methods import METHODS
from specgen.pair.pair import Pair, Result
from specgen.workers.worker import DraftWorker

METHOD_NAMES = tuple(name for name, method in METHODS.items() if method.lossless)
LOSSY = {"mtad", "bild", "joint"}


@settings(max_examples=200, deadline=None)
@given(
    method=st.sampled_from(METHOD_NAMES),
    length=st.integers(1, 8),
    limit=st.integers(1, 12),
    eos=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    target=st.integers(0, 5),
    draft=st.integers(0, 5),
)
def test_greedy_runs_end_exactly_where_plain_decoding_ends(
    method: str, length: int, limit: int, eos: frozenset[int], target: int, draft: int
) -> None:
    table = TableRunner(target)
    expected: list[int] = []
    while len(expected) < limit and not (expected and expected[-1] in eos):
        expected.append(int(table.row([*PROMPT, *expected]).argmax()))
    setting = LENGTH_SETTINGS.get(method)
    runner, sampling = TableRunner(draft), SamplingParams(max_new_tokens=limit)
    with closing(DraftWorker.in_this_process(runner)) as worker:  # type: ignore[arg-type]
        run = scripted_run(method, {setting: length} if setting else {}, table, runner, sampling, eos=eos, worker=worker)
        rounds = list(run.rounds())
    assert ids_of(rounds) == expected
    assert run.finish_reason == ("eos" if expected[-1] in eos else "length")
    assert rounds[0].mode == "prefill"
    assert [round_.index for round_ in rounds] == list(range(len(rounds)))


def test_the_context_ends_a_run(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("gpt2", "near")
    sampling = SamplingParams(max_new_tokens=500, ignore_eos=True)
    request = pair.request([5] * 100, "sd", sampling, k=6)
    run = pair.run(request)
    rounds = list(run.rounds())
    assert request.context_ends
    assert sum(len(round_.token_ids) for round_ in rounds) == CONTEXT - 100
    assert run.finish_reason == "length"
    with pytest.raises(specgen.SpecgenError, match=r"too long: 128 tokens and 500 new ones are 500 over the target's 128"):
        pair.run(pair.request([5] * CONTEXT, "sd", sampling))


QUESTION = "Question: Ben has 5 cards. He buys 2 packs with 3 cards in each. How many cards does Ben have now?\nAnswer:"


@pytest.fixture(scope="module")
def free(demo_pair: Pair) -> Result:
    """An output without an end-of-sequence."""
    return demo_pair.generate(QUESTION, "ar", SamplingParams(max_new_tokens=40))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_stop_texts_end_the_output_at_the_token_that_completes_them(demo_pair: Pair, free: Result, method: str) -> None:
    stop = free.text[21:26]
    first = free.text.index(stop)
    unmeasured = {"pearl": {"window": 4}, "selfsd": {"skip": "3+4+5"}}.get(method, {})
    result = demo_pair.generate(QUESTION, method, SamplingParams(max_new_tokens=40, stop=("nowhere", stop)), **unmeasured)
    assert result.text == free.text[:first]
    assert result.summary["finish_reason"] == "stop"
    assert result.token_ids == free.token_ids[: len(result.token_ids)]
    whole, before = (demo_pair.tokenizer.text_of(result.token_ids[:end]) for end in (None, -1))
    assert stop in whole
    assert stop not in before
    assert ids_of(result.rounds) == result.token_ids


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")

    def tokens(seed: int | None) -> list[int]:
        return pair.generate([1, 5, 6], "svip", SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)).token_ids

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(5)}) > 1
    assert len({tuple(tokens(None)) for _ in range(5)}) > 1


def test_runs_may_take_turns_and_be_left_unfinished(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("mistral", "near")
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    prompts = [[1, 5, 6], [1, 5, 9, 9]]
    expected = [pair.generate(prompt, "ar", sampling).token_ids for prompt in prompts]
    unfinished = pair.rounds(prompts[0], "sd", sampling)
    next(unfinished)
    next(unfinished)
    unfinished.close()
    left, right = (pair.rounds(prompt, "sd", sampling) for prompt in prompts)
    found: list[list[int]] = [[], []]
    for first, second in zip(left, right, strict=False):
        found[0] += first.token_ids
        found[1] += second.token_ids
    length = min(len(found[0]), len(found[1]))
    assert [tokens[:length] for tokens in found] == [tokens[:length] for tokens in expected]


@contextmanager
def interrupted_layer(pair: Pair, index: int) -> Iterator[None]:
    """Raises KeyboardInterrupt when the target reaches its layer with this index."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    model = pair.target.model
    if isinstance(model, TransformersModel):
        handle = model.module.model.layers[index].register_forward_pre_hook(interrupt)
        yield
        handle.remove()
    else:
        layers = pair._target_runner._forward._layers  # type: ignore[attr-defined]
        kept, layers[index] = layers[index], (interrupt, layers[index][1])
        yield
        layers[index] = kept


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interruption_inside_a_pass_costs_that_round_only(pair_of: Callable[..., Pair], backend: str) -> None:
    pair = pair_of("qwen3", "near", backend)
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = pair.generate([1, 5, 6], "ar", sampling).token_ids
    rounds = pair.rounds([1, 5, 6], "sd", sampling)
    done = [next(rounds) for _ in range(3)]
    with interrupted_layer(pair, 2), pytest.raises(KeyboardInterrupt):
        next(rounds)
    tokens = ids_of(done)
    assert tokens == expected[: len(tokens)]
    assert pair.generate([1, 5, 6], "sd", sampling).token_ids == expected


def test_a_summary_recomputes_from_its_rounds(demo_pair: Pair) -> None:
    result = demo_pair.generate("def add(a, b):\n", "sd", SamplingParams(max_new_tokens=40))
    summary, rounds = result.summary, result.rounds
    drafted = sum(len(round_.draft.tokens) for round_ in rounds)
    accepted = sum(len(round_.verdict.path) for round_ in rounds)
    rate, share = accepted / drafted, accepted / len(result.token_ids)
    assert summary["target_passes"] == summary["rounds"] == len(rounds)
    assert (summary["drafted"], summary["accepted"]) == (drafted, accepted)
    assert summary["acceptance_rate"] == pytest.approx(rate)
    assert summary["draft_share"] == pytest.approx(share)
    assert summary["harmonic_mean"] == pytest.approx(2 * rate * share / (rate + share))
    assert summary["block_efficiency"] == pytest.approx(len(result.token_ids) / len(rounds))
    assert summary["seconds"] == pytest.approx(sum(sum(round_.seconds.values()) for round_ in rounds))
    assert sum(summary["phase_seconds"].values()) == pytest.approx(summary["seconds"])


def test_rounds_keep_no_tensors(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")
    result = pair.generate([1, 5], "sd", SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True))
    assert all(round_.draft.probs is None for round_ in result.rounds)
    gc.collect()
    assert not any(isinstance(held, torch.Tensor) for round_ in result.rounds for held in gc.get_referents(round_.draft))


def test_the_python_interface(demo_pair: Pair) -> None:
    assert set(specgen.METHODS) == set(METHODS) == {*METHOD_NAMES, *LOSSY}
    assert {name for name, method in METHODS.items() if not method.lossless} == LOSSY
    with specgen.load() as pair:
        rounds = list(pair.rounds("User: Hi\nAssistant:", method="sd", sampling=SamplingParams(max_new_tokens=12), k="3"))
        assert all(isinstance(round_, Round) for round_ in rounds)
        assert pair.generate("def f():", sampling=SamplingParams(max_new_tokens=4)).summary["method"] == "adaptive"
    bad = [
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "method": "sivp"}, "did you mean svip"),
        ({"prompt": "x", "method": "sd", "kk": 3}, "no setting 'kk'; did you mean k"),
        ({"prompt": "x", "method": "sd", "k": 2.5}, "whole number"),
        ({"prompt": "x", "method": "svip", "threshold": float("nan")}, "between"),
        ({"prompt": "x", "method": "lookup", "policy": "svip"}, "does not compute entropy"),
        ({"prompt": [1, 9999]}, "token id 9999"),
    ]
    for arguments, message in bad:
        with pytest.raises(specgen.SpecgenError, match=message):
            demo_pair.rounds(**arguments)  # raised by the call, not by the first round
    with pytest.raises(specgen.SpecgenError, match="no target"):
        specgen.load(draft="somewhere")
