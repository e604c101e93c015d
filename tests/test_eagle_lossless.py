"""Drafts of EAGLE heads change no output: greedy ids are the target's own, samples follow its distribution."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from eagle_heads import random_head
from enumeration import PROMPT, Paths, states, total_variation
from families import make_model, model_of, plain, prompt
from runner_checks import LAYERED, uncached
from scripted_models import scripted_run
from specgen.engine.parts.eagle_runner import make_runners
from specgen.engine.parts.head_runners import HeadRunners
from statistics_checks import output_distribution

from specgen.base.types import SamplingParams
from specgen.decoding import logits_ops
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner

SMALL = 7  # tokens of a vocabulary in which random heads are often right
COUNT = 16
OFTEN = (("llama", "native"), ("gemma2", "native"), ("gemma", "native"), ("qwen3", "transformers"))
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "chain": ("sd", {"k": 4}),
    "policy": ("sd", {"policy": "svip", "threshold": 1.0, "max_draft": 5}),
    "tree": ("sd", {"width": 3, "depth": 3}),
    "draws": ("specinfer", {"k": 3, "drafts": 2}),
}
HEADS: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "3": {"version": 3, "vocabulary": SMALL},
    "3 reduced": {"version": 3, "vocabulary": [0, 3, 4, 6], "qk_norm": True},
}


@cache
def target(family: str, backend: str, size: int = SMALL) -> tuple[Any, Model]:
    module = make_model(family, bos_token_id=1, pad_token_id=0, vocab_size=size)
    module.generation_config.eos_token_id = None
    return module, model_of(module, backend)


def runners(head: dict[str, Any], model: Model) -> HeadRunners:
    return make_runners(random_head(**head), model, ModelRunner(model), lambda: None)


@pytest.mark.parametrize(
    ("family", "backend"), [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow) for case in LAYERED]
)
def test_greedy_ids_are_the_targets_own(family: str, backend: str) -> None:
    module, model = target(family, backend)
    wanted, accepted = {}, 0
    combinations = (
        [*product(HEADS, METHODS)]
        if (family, backend) == ("llama", "native")
        else [*zip(HEADS, [*METHODS][:3], strict=True), ("1", "draws")]
    )
    for number, (head, name) in enumerate(combinations):
        ids = [token % SMALL for token in prompt(number % 2)]
        if number < 2:
            wanted[number] = plain(module, ids, COUNT)
        made, (method, settings) = runners(HEADS[head], model), METHODS[name]
        run = scripted_run(method, settings, made.target, made.draft, SamplingParams(max_new_tokens=COUNT), prompt=ids)
        rounds = list(run.rounds())
        assert [token for round_ in rounds for token in round_.token_ids] == wanted[number % 2], (head, name)
        accepted += sum(len(round_.verdict.path) for round_ in rounds)
    assert accepted > 0


SAMPLED = {
    "chain": ("sd", {"k": 3}, {"version": 1}),
    "tree": ("sd", {"width": 2, "depth": 2}, {"version": 3, "vocabulary": 3}),
    "draws": ("specinfer", {"k": 2, "drafts": 2}, {"version": 3, "vocabulary": [0, 2]}),
}


@pytest.mark.parametrize(
    ("name", "limit"),
    [("chain", 3), ("tree", 3), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in SAMPLED)],
)
def test_samples_follow_the_targets_distribution(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all random paths of whole runs."""
    method, settings, head = SAMPLED[name]
    module, model = target("llama", "native", 3)
    made, sampling = runners(head, model), SamplingParams(max_new_tokens=limit, temperature=2.0)
    with monkeypatch.context() as patch:
        found = Paths(patch).of_rounds(lambda: states(method, settings, made.target, made.draft, sampling))

    def next_probs(tokens: tuple[int, ...]) -> list[float]:
        return logits_ops.warp(uncached(module, [*PROMPT, *tokens]), sampling).tolist()

    wanted = output_distribution(next_probs, limit)
    assert len(wanted) == 3**limit
    assert total_variation(found, wanted) < 2e-5
