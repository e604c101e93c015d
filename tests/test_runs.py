"""Where a run ends and what it reports: limits, ends of sequence, stop texts, interruptions, second
runs, Python's interface."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_lengths import LENGTH_SETTINGS
from families import BACKENDS, make_model, model_of, near_copy, save, with_exit
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_checks import CountedLayers

import specgen
from specgen.base.types import Round, SamplingParams, TokenStatus
from specgen.engine.model_runner import ModelRunner
from specgen.engine.transformers.transformers_model import TransformersModel
from specgen.methods import METHODS
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair, Result
from specgen.testing.scripted_models import PROMPT, VOCAB, TableRunner, ids_of, scripted_run
from specgen.workers.worker import DraftWorker

METHOD_NAMES = tuple(name for name, method in METHODS.items() if method.lossless)
LOSSY = {"mtad", "bild", "fly", "joint"}


@settings(max_examples=120, deadline=None)
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
    runner = TableRunner(draft)
    sampling = SamplingParams(max_new_tokens=limit)
    with closing(DraftWorker.in_this_process(runner)) as worker:  # type: ignore[arg-type]
        run = scripted_run(
            method,
            {setting: length} if setting else {},
            table,
            runner,
            sampling,
            eos=eos,
            worker=worker,
        )
        rounds = list(run.rounds())
    assert ids_of(rounds) == expected
    assert run.finish_reason == ("eos" if expected[-1] in eos else "length")
    assert rounds[0].mode == "prefill"
    assert [round_.index for round_ in rounds] == list(range(len(rounds)))


QUESTION = (
    "Question: Ben has 5 cards. He buys 2 packs with 3 cards in each. How many "
    "cards does Ben have now?\nAnswer:"
)


@pytest.fixture(scope="module")
def free(demo_pair: Pair) -> Result:
    """An output without an end-of-sequence."""
    return demo_pair.generate(QUESTION, "ar", SamplingParams(max_new_tokens=40))


@pytest.mark.parametrize(
    "method", ["ar", "sd", "lookup", "lookahead", "pearl", "eagle", "medusa", "selfsd"]
)
def test_stop_texts_end_the_output_at_the_token_that_completes_them(
    demo_pair: Pair, free: Result, method: str
) -> None:
    stop = free.text[21:26]
    first = free.text.index(stop)
    unmeasured = {"pearl": {"window": 4}, "selfsd": {"skip": "3+4+5"}}.get(method, {})
    result = demo_pair.generate(
        QUESTION, method, SamplingParams(max_new_tokens=40, stop=("nowhere", stop)), **unmeasured
    )
    assert result.text == free.text[:first]
    assert result.summary["finish_reason"] == "stop"
    assert result.token_ids == free.token_ids[: len(result.token_ids)]
    whole, before = (demo_pair.tokenizer.text_of(result.token_ids[:end]) for end in (None, -1))
    assert stop in whole
    assert stop not in before
    assert ids_of(result.rounds) == result.token_ids
    last = result.rounds[-1]
    assert last.verdict.source == "correction" or TokenStatus.REJECTED not in last.statuses, (
        "nothing was refused"
    )


@pytest.mark.parametrize(
    ("name", "temperature"), [("sd", 0.0), ("sd", 1.0), ("eesd-cali", 0.0), ("eesd-tree", 1.0)]
)
def test_runs_may_take_turns_and_be_left_unfinished(
    tmp_path: Path, name: str, temperature: float
) -> None:
    """Each as if it were alone, although its rounds take the caches from the other's."""
    model = make_model("llama", num_hidden_layers=4)
    folders = [
        save(each, tmp_path / str(number)) for number, each in enumerate((model, near_copy(model)))
    ]
    pair = with_exit(specgen.load(*folders, device="cpu", dtype="float32"), 2)
    sampling = SamplingParams(24, temperature, seed=3, ignore_eos=True)
    prompts = [[1, 5, 6, 7, 8, 9], [1, 5, 6, 11, 12]]
    alone = [pair.generate(prompt, name, sampling).rounds for prompt in prompts]
    unfinished = pair.rounds(prompts[0], name, sampling)
    next(unfinished)
    unfinished.close()
    turns = list(zip(*(pair.rounds(prompt, name, sampling) for prompt in prompts), strict=False))
    assert len(turns) > 3
    for found, expected in zip(zip(*turns, strict=True), alone, strict=True):
        for round_, other in zip(found, expected, strict=False):
            assert (round_.token_ids, list(round_.draft.tokens)) == (
                other.token_ids,
                list(other.draft.tokens),
            )
            assert round_.draft.stop_reason == other.draft.stop_reason


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
        forward = pair.models._target_runner._forward
        stack = forward._stack  # type: ignore[attr-defined]
        kept = stack._short, stack._layers, forward._program  # type: ignore[attr-defined]
        # the layers are called one by one
        forward._program = None  # type: ignore[attr-defined]
        stack._short = [piece._replace(program=None) for piece in stack._long]
        stack._layers = [*kept[1][:index], interrupt, *kept[1][index + 1 :]]
        yield
        stack._short, stack._layers, forward._program = kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interruption_inside_a_pass_costs_that_round_only(
    pair_of: Callable[..., Pair], backend: str
) -> None:
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


def test_the_python_interface(demo_pair: Pair) -> None:
    assert set(specgen.METHODS) == set(METHODS) == {*METHOD_NAMES, *LOSSY}
    assert {name for name, method in METHODS.items() if not method.lossless} == LOSSY
    with specgen.load() as pair:
        rounds = list(
            pair.rounds(
                "User: Hi\nAssistant:",
                method="sd",
                sampling=SamplingParams(max_new_tokens=12),
                k="3",
            )
        )
        assert all(isinstance(round_, Round) for round_ in rounds)
        assert (
            pair.generate("def f():", sampling=SamplingParams(max_new_tokens=4)).summary["method"]
            == "adaptive"
        )
        one = pair.generate("hi", "sd", k=2, max_new_tokens=4)
        other = pair.generate("hi", "sd:k=2", SamplingParams(4))
        assert [round_.draft.tokens for round_ in one.rounds] == [
            round_.draft.tokens for round_ in other.rounds
        ]
        answer = pair.generate([{"role": "user", "content": "Where is Oslo?"}])
        # before the next question that the model would write
        assert answer.summary["finish_reason"] == "stop"
        assert "User" not in answer.text
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "method": "sd", "kk": 3}, "no setting 'kk'; did you mean k"),
        ({"prompt": [1, 9999]}, "token id 9999"),
        ({"prompt": None}, "the prompt is None"),
        ({"prompt": [{"role": "user"}]}, "a message without role and content"),
        ({"prompt": "x", "method": 3}, "no method '3'"),
        ({"prompt": "x", "sampling": {}}, "sampling is a mapping"),
    ]
    for arguments, message in bad:
        with pytest.raises(specgen.SpecgenError, match=message):
            demo_pair.rounds(**arguments)  # raised by the call, not by the first round
    with pytest.raises(specgen.SpecgenError, match="without --target"):
        specgen.load(draft="somewhere")


# perplexity

SAMPLED = SamplingParams(
    max_new_tokens=20, temperature=1.3, top_k=20, top_p=0.9, seed=1, ignore_eos=True
)


def uncached(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> float:
    """The log-likelihood of `tokens` in float64, by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    return float(logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "native"), ("gemma2", "native"), ("gpt2", "transformers")]
)
def test_perplexity_is_that_without_a_cache(
    pair_of: Callable[..., Pair], family: str, backend: str
) -> None:
    """At temperature 1. Lossy methods always report it, others on request."""
    pair = pair_of(family, "near", backend)
    prompt = [1, 5, 6, 7]
    for method in ("ar", "mtad", "spectr"):  # each run finds the caches of the one before
        found, default = (
            pair.generate(prompt, method, SAMPLED, perplexity=on) for on in (True, False)
        )
        nats = uncached(pair.target.transformers_module, prompt, found.token_ids)
        assert found.summary["perplexity"] == pytest.approx(
            math.exp(-nats / len(found.token_ids)), rel=1e-4
        )
        assert default.token_ids == found.token_ids
        assert default.summary["perplexity"] == (
            found.summary["perplexity"] if method == "mtad" else None
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 8, 100])
def test_long_texts_are_run_in_chunks_each_token_once(
    chunk: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.engine.model_runner._LIKELIHOOD_CHUNK", chunk)
    module = make_model("llama")
    prompt = [1, 5, 6, 7]
    tokens = [3 + position % 30 for position in range(16)]
    model = model_of(module, backend)
    expected = uncached(module, prompt, tokens)
    counted = CountedLayers(model).tokens
    assert ModelRunner(model).log_likelihood(prompt, tokens) == pytest.approx(expected, rel=1e-4)
    assert counted["2"] == len(prompt) + len(tokens) - 1


@pytest.mark.parametrize(
    ("nats", "perplexity"),
    [
        (-2 * math.log(3), 3.0),
        (-math.inf, None),
        (-1e6, None),
        (math.nan, None),
        (None, None),
    ],
)
def test_perplexities_that_json_cannot_hold_are_none(
    nats: float | None, perplexity: float | None
) -> None:
    figures = Figures("mtad")
    figures.token_ids = [1, 2]
    if nats is not None:
        figures.add_log_likelihood(nats)
    assert figures.perplexity == (perplexity if perplexity is None else pytest.approx(perplexity))
    json.dumps(figures.as_dict("", "length"), allow_nan=False)
