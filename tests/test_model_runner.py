"""Model runners: the logits of transformers, each token run once, layers left out. Calls in any
order: see `test_runners`."""

from __future__ import annotations

from contextlib import suppress
from itertools import count, product
from random import Random

import pytest
import torch
from families import BACKENDS, IS_OLD_TRANSFORMERS, SHAPES, make_bloom, make_model, model_of
from runner_checks import HYBRID, RUN_BY, CountedLayers, InterruptAt, check, path_to, uncached

from specgen.base.errors import SpecgenError
from specgen.base.skipped_layers import SkippedLayers
from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.methods.skip_search import search_skips

SHAPED = [
    (number, backend)
    for number, backend in product(range(len(SHAPES)), BACKENDS)
    if (SHAPES[number][0], backend) in HYBRID
]


@pytest.mark.parametrize(("family", "backend"), RUN_BY + HYBRID)
def test_a_tree_its_path_and_a_chain_give_transformers_logits(family: str, backend: str) -> None:
    module = make_model(family)
    runner = ModelRunner(model_of(module, backend))
    context = Context([1, 5, 6, 7])
    tokens = [8, 9, 10, 11]
    parents = [-1, -1, 1, 0]
    check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
    context.extend([9, 10, 12, *range(20, 34)])  # beyond the window of those that have one
    check(module, runner.logits(context, tokens).logits, context, tokens, [-1, 0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "backend"), SHAPED)
def test_hybrids_of_other_shapes_with_drafts_rejected_at_every_place(
    number: int, backend: str
) -> None:
    """After texts of up to 300 tokens, of which layers fold parts into their states, and after
    shorter ones again."""
    family, shape = SHAPES[number]
    module = make_model(family, shape={**shape, "max_position_embeddings": 512})
    rng = Random(number)
    runner = ModelRunner(model_of(module, backend))
    context = Context([1, *(rng.randrange(3, 40) for _ in range(50))])
    cases = [(length, right) for length in range(1, 9) for right in range(length + 1)]
    rng.shuffle(cases)
    for length, right in cases:
        greedy: list[int] = []
        for _ in range(right):
            greedy.append(int(uncached(module, context.ids + greedy).argmax()))
        tokens = [*greedy, *(rng.randrange(3, 40) for _ in range(length - right))]
        if rng.random() < 0.3:
            with InterruptAt(rng.randrange(1, 2500)), suppress(KeyboardInterrupt):
                runner.logits(context, tokens[1:])
        parents = [
            node - 1 if node <= right or rng.random() < 0.5 else rng.randrange(-1, node)
            for node in range(length)
        ]
        logits = runner.logits(context, tokens, parents).logits
        for node in range(-1, length):
            expected = uncached(module, context.ids + path_to(tokens, parents, node))
            torch.testing.assert_close(logits[node + 1], expected, rtol=1e-3, atol=5e-3)
        context.extend(
            [
                *greedy,
                rng.randrange(3, 40),
                *(rng.randrange(3, 40) for _ in range(rng.choice((0, 0, 63, 64)))),
            ]
        )
        if len(context) > 300:
            context = Context(context.ids[: rng.randrange(1, 200)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_token_is_run_once(backend: str) -> None:
    """Of a chain that grows, of a tree that grows level by level and whose second branch is
    accepted, of other calls."""
    module = make_model("llama")
    model = model_of(module, backend)
    counted = CountedLayers(model).tokens
    runner = ModelRunner(model)
    context = Context([1, 5, 6, 7])

    def run(tokens: list[int], parents: list[int], start: int, expected: int) -> None:
        counted.clear()
        logits = runner.logits(context, tokens, parents, start=start).logits.clone()
        assert counted["2"] == expected
        check(module, logits, context, tokens, parents, start=start)

    for length, new in enumerate((4, 1, 1, 1)):
        run([8, 9, 10][:length], [-1, 0, 1][:length], length, new)
    context.extend([8, 9, 30])  # two accepted, then a correction
    run([], [], 0, 1)
    run([7, 8], [-1, -1], 1, 2)
    run([7, 8, 9, 10, 11], [-1, -1, 1, 1, 0], 3, 3)
    # the second branch: its cache entries are gathered, only the last token is new
    context.extend([8, 10, 12])
    run([], [], 0, 1)
    for new in (3, 3):
        run([8, 9], [-1, 0], 0, new)
    run([8, 9, 10], [-1, 0, 1], 3, 1)
    run([8, 7], [-1, 0], 2, 1)  # another draft with the same beginning
    ids = context.ids[:-2]
    context = Context(ids)
    assert runner.cached_tokens(Context([*ids[:3], 33])) == 3
    run([], [], 0, len(ids) - 3)
    context = Context([*ids[:2], 33, *ids[3:]])
    run([], [], 0, len(ids) - 2)


def test_alibi_models_run_chains_and_refuse_trees() -> None:
    module = make_bloom()
    runner = ModelRunner(model_of(module, "transformers"))
    context = Context([1, 5, 6])
    check(module, runner.logits(context, [7, 8]).logits, context, [7, 8], [-1, 0])
    context.extend([7, 9])
    check(module, runner.logits(context, [4]).logits, context, [4], [-1])
    with pytest.raises(SpecgenError, match="ALiBi"):
        runner.logits(context, [7, 8], [-1, -1])


@pytest.mark.skipif(
    IS_OLD_TRANSFORMERS,
    reason="these states cannot be rolled back with this version of transformers",
)
def test_a_limit_of_time_steps_holds_in_passes_of_one_token_too() -> None:
    """Transformers applies it to passes of several tokens only, so that its logits depend on how a
    text is cut into passes."""
    module = make_model(
        "mamba2",
        shape={"num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_limit": [0.0, 0.1]},
    )
    runner = ModelRunner(model_of(module, "transformers"))
    context = Context([1, 5, 6, 7])
    check(module, runner.logits(context).logits, context, [], [])
    for token in (8, 9):
        context.extend([token])
        check(module, runner.logits(context).logits, context, [], [])


@pytest.mark.parametrize("family", ["jamba", "mamba"])
def test_a_long_text_does_not_start_from_the_state_of_another(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run in chunks, of which the first are left to the last."""
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    module = make_model(family)
    runner = ModelRunner(model_of(module, "transformers"))
    for ids in ([1, 5, 6], [2, 5, 6, *range(3, 20)], [2, 5, 7]):
        context = Context(ids)
        check(module, runner.logits(context).logits, context, [], [])


@pytest.mark.parametrize(
    "family", ["jamba", "recurrent_gemma", "mamba", *(["mamba2"] if IS_OLD_TRANSFORMERS else [])]
)
def test_states_that_cannot_be_rolled_back_run_the_text_again(family: str) -> None:
    """Of jamba and mamba, whose states grow token by token, and of recurrent_gemma, which keeps it
    in its modules."""
    module = make_model(family)
    model = model_of(module, "transformers")
    context = Context([1, 5, 6, 7])
    runner = ModelRunner(model)
    for tokens in ([8, 9], [8, 10, 11], []):
        check(module, runner.logits(context, tokens).logits, context, tokens, [-1, 0, 1])
        context.extend([8, 10])
    runner.logits(context)
    runs = runner.forward_count
    context.extend([12, 13])
    check(module, runner.logits(context, start=0).logits, context, [], [])
    assert runner.forward_count == runs + 1
    check(module, runner.logits(Context([1, 5, 9])).logits, Context([1, 5, 9]), [], [])
    with pytest.raises(SpecgenError, match="draft trees"):
        runner.logits(context, [7, 8], [-1, -1])


# ------------------------------------------------------------------ layers left out


def test_the_search_finds_the_fastest_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a speed that is highest at a known set, the search finds that set, whatever its first
    guesses are."""
    monkeypatch.setattr("time.perf_counter", count().__next__)  # each reading takes a second
    wanted = SkippedLayers.parse("1a+2+3m", 4)
    found = search_skips(
        4,
        lambda skips: 100.0 - len(skips.attention ^ wanted.attention) - len(skips.mlp ^ wanted.mlp),
        300,
    )
    assert max(found, key=lambda skips: found[skips]) == str(wanted)
    assert len(found) <= 4**4
