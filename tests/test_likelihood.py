"""Perplexity: equal to that without caches and chunks, at temperature 1 and without penalties; None if undefined."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from families import BACKENDS, make_model, model_of
from runner_checks import CountedLayers

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.model_runner import ModelRunner
from specgen.pair.pair import Pair, Result

PROMPT = [1, 5, 6, 7]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.3, top_k=20, top_p=0.9, seed=1, ignore_eos=True)


def uncached(model: torch.nn.Module, tokens: list[int], prompt: list[int] = PROMPT) -> float:
    """The log-likelihood of `tokens` in float64, by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return float(logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


def check(pair: Pair, result: Result) -> None:
    expected = math.exp(-uncached(pair.target.transformers_module, result.token_ids) / len(result.token_ids))
    assert result.summary["perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["ar", "sd", "spectr", "specinfer", "lookup", "mtad", "bild"])
@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParams(max_new_tokens=20)])
def test_lossy_methods_always_report_perplexity_and_others_on_request(
    pair_of: Callable[..., Pair], method: str, sampling: SamplingParams
) -> None:
    pair = pair_of("llama", "near")
    requested, default = (pair.generate(PROMPT, method, sampling, perplexity=on) for on in (True, False))
    check(pair, requested)
    assert requested.token_ids == default.token_ids
    lossy = not specgen.METHODS[method].lossless
    assert default.summary["perplexity"] == (requested.summary["perplexity"] if lossy else None)
    again = pair.generate(PROMPT, "ar", SamplingParams(max_new_tokens=20))
    assert again.token_ids == pair.generate(PROMPT, "sd", SamplingParams(max_new_tokens=20)).token_ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 100])
def test_long_texts_are_run_in_chunks_each_token_once(chunk: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.model_runner._LIKELIHOOD_CHUNK", chunk)
    module = make_model("llama")
    tokens = [3 + position % 30 for position in range(16)]
    expected = uncached(module, tokens)
    model = model_of(module, backend)
    counted = CountedLayers(model).tokens
    assert ModelRunner(model).log_likelihood(PROMPT, tokens) == pytest.approx(expected, rel=1e-4)
    assert counted["2"] == len(PROMPT) + len(tokens) - 1
