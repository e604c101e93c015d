"""Layer skipping: the skipped parts, the shared cache, and the search for the layers to skip."""

from __future__ import annotations

import copy
import random
from itertools import count
from typing import Any

import pytest
import torch
from families import BACKENDS, make_model, model_of
from runner_checks import LAYERED, TOLERANCE, check, four_layers, quick

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.pair.preparation import search_skips


def test_skipped_layers_are_parsed_and_printed() -> None:
    skips = SkippedLayers.parse("3+5a+7m+5m", 8)
    assert skips == SkippedLayers(frozenset({3, 5}), frozenset({3, 5, 7}))
    assert str(skips) == "3+5+7m"
    assert SkippedLayers.parse(str(skips), 8) == skips


@pytest.mark.parametrize(
    ("text", "named"), [("", "skip is ''"), ("3,5", "3,5"), ("8", "layer 8"), ("-1", "skip is '-1'"), ("2x", "2x"), ("1+", "1+")]
)
def test_mistakes_in_skip_are_reported(text: str, named: str) -> None:
    with pytest.raises(SpecgenError, match=named.replace("+", r"\+")):
        SkippedLayers.parse(text, 8)


def skipped(module: Any, skips: SkippedLayers) -> Any:
    """A model that computes the same with all layers: the output weights of the skipped parts are zero."""
    zeroed = copy.deepcopy(module)
    with torch.no_grad():
        for number, layer in enumerate(zeroed.model.layers):
            outputs = [layer.self_attn.o_proj] if number in skips.attention else []
            if number in skips.mlp:
                outputs.append(getattr(layer.mlp, "down_proj", None) or layer.mlp.c_proj)
            for output in outputs:
                output.weight.zero_()
                if output.bias is not None:
                    output.bias.zero_()
    return zeroed


@pytest.mark.parametrize(
    ("family", "backend", "skip"),
    quick((*case, skip) for case in LAYERED for skip in ("0", "2a", "1m", "1+3a+2m") if case[0] == "llama" or "+" in skip),
)
def test_drafts_read_the_targets_cache(family: str, backend: str, skip: str) -> None:
    """The committed tokens' cache entries are the whole model's, so the expected logits come from such a cache."""
    module = make_model(family, **four_layers(family))
    skips = SkippedLayers.parse(skip, 4)
    model, zeroed = model_of(module, backend), model_of(skipped(module, skips), backend)
    target = ModelRunner(model)
    runner = LayerSkippingRunner(target, model, skips)
    rng = random.Random(skip)
    context = Context([1, 5, 6, 7])
    target.logits(context)
    for _ in range(4):
        context.extend([rng.randrange(3, 40)])
        tokens = [rng.randrange(3, 40) for _ in range(3)]
        expected = logits_on_targets_cache(model, zeroed, context, tokens)
        grown = [runner.logits(context, tokens[:size], start=size).logits[0] for size in range(4)]
        assert torch.allclose(torch.stack(grown), expected, atol=TOLERANCE, rtol=1e-4)
        assert torch.allclose(runner.logits(context, tokens).logits, expected, atol=TOLERANCE, rtol=1e-4)
        check(module, target.logits(context, tokens).logits, context, tokens, [-1, 0, 1])
        context.extend(tokens[: rng.randrange(4)])


@torch.inference_mode()  # the runners' caches are inference tensors
def logits_on_targets_cache(model: Model, zeroed: Model, context: Context, tokens: list[int]) -> torch.Tensor:
    """The logits of the model with zeroed weights, after keys and values that the whole model computed for `context.ids[:-1]`."""
    whole, part = ModelRunner(model), ModelRunner(zeroed)
    past = Context(context.ids[:-1])
    whole.logits(past)
    part.logits(past)
    part._cached.cache = part.cache = whole.cache
    past.extend(context.ids[-1:])
    return part.logits(past, tokens).logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_are_refused(backend: str) -> None:
    model = model_of(make_model("llama"), backend)
    runner = LayerSkippingRunner(ModelRunner(model), model, SkippedLayers.parse("1", 3))
    with pytest.raises(SpecgenError, match="no trees"):
        runner.logits(Context([1, 5]), [6, 7], [-1, -1])


def test_the_search_finds_the_fastest_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a speed that is highest at a known set, the search finds that set, whatever its first guesses are."""
    monkeypatch.setattr("time.perf_counter", count().__next__)  # each reading takes a second
    wanted = SkippedLayers.parse("1a+2+3m", 4)

    def speed(skips: SkippedLayers) -> float:
        return 100.0 - len(skips.attention ^ wanted.attention) - len(skips.mlp ^ wanted.mlp)

    found = search_skips(4, speed, seconds=300)
    assert (found.skips, found.tokens_per_second) == (str(wanted), 100.0)
    assert found.tried <= 4**4
