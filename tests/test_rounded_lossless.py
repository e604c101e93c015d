"""Lossless methods on targets whose weights are rounded to 8 bits, or to 4 bits with a minimum:
greedy ids are those of plain decoding, sampled outputs have the target's distribution.

The reference is the rounded target itself, whose tokens are run one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import exit_layers_of, make_model, near_copy
from runner_checks import four_layers
from statistics_checks import (
    LENGTH,
    SIGNIFICANCE,
    TOKENS,
    first_tokens,
    p_value,
)

from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.decoding import token_sampling
from specgen.engine.kernels.library import kernels
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.native_model import NativeModel, load_native
from specgen.engine.parts import own_layers
from specgen.engine.parts.own_layers import ExitWeights
from specgen.testing.enumeration import (
    PROMPT,
    ROUNDING,
    InlineWorker,
    Paths,
    exact,
    output_distribution,
    states,
    total_variation,
)
from specgen.testing.scripted_models import ids_of, scripted_run

KINDS = ("int8", "int4")
CHAIN, TREE, PEARL = "sd:k=3", "sd:k=2:width=2", "pearl:window=2"
EXITS = ("eesd-fixed:k=2", "eesd-tree:width=2:depth=2:theta0=1")
METHODS = (CHAIN, TREE, PEARL, *EXITS)
FAMILIES = ("llama", "gemma2", "qwen3", "olmo2")
# these kinds and methods run by default: each kind, each sort of drafts
OFTEN = {("int8", CHAIN), ("int4", TREE), ("int4", PEARL), ("int8", EXITS[0]), ("int4", EXITS[1])}


def some(cases: Sequence[tuple[str, ...]], often: Callable[..., bool]) -> list[Any]:
    """The cases as parameters, those that do not run often as slow ones."""
    return [pytest.param(*case, marks=() if often(*case) else pytest.mark.slow) for case in cases]


@cache
def module_of(family: str, vocabulary: int, spread: float) -> Any:
    return make_model(
        family, vocab_size=vocabulary, initializer_range=spread, **four_layers(family)
    )


def rounded(module: Any, kind: str) -> NativeModel:
    with TemporaryDirectory() as name:
        folder = Path(name)
        module.save_pretrained(folder)
        return load_native(
            folder,
            "a test's",
            read_architecture(read_config(folder, "a test's")),
            torch.float32,
            torch.device("cpu"),
            quantise=kind,
            wide_attention=kernels() is None,
        )


class Rounded:
    """A rounded target with what drafts for it by `method`: a rounded draft model, or the target's
    first two layers with an untrained exit layer."""

    def __init__(self, kind: str, method: str, module: Any) -> None:
        model = rounded(module, kind)
        self.name, *given = method.split(":")
        self.settings: dict[str, Any] = dict(parse_pairs(given))
        self._plain = ModelRunner(model)
        if method in EXITS:
            weights = ExitWeights(exit_layers_of(model, module), 2)
            made = own_layers.make_runners(weights, model, None, lambda: None)
            self.target: Any = made.target
            self.draft: Any = made.draft
        else:
            self.target = ModelRunner(model)
            self.draft = ModelRunner(rounded(near_copy(module, 0.3), kind))

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [vocabulary] after `ids`, whose last token is run alone."""
        context = Context(list(ids[:-1]))
        self._plain.clear_cache()
        self._plain.logits(context)
        context.extend(ids[-1:])
        return self._plain.logits(context).logits[0].clone()

    def greedy(self, count: int) -> list[int]:
        ids = list(PROMPT)
        for _ in range(count):
            ids.append(int(self.row(ids).argmax()))
        return ids[len(PROMPT) :]

    def run(self, sampling: SamplingParams, seed: int = 0) -> Any:
        worker: Any = InlineWorker(self.draft)
        return scripted_run(
            self.name,
            self.settings,
            self.target,
            self.draft,
            sampling,
            seed=seed,
            worker=worker,
            prompt=PROMPT,
        )


@pytest.mark.parametrize(
    ("family", "kind", "method"),
    some(
        [*product(FAMILIES, KINDS, METHODS)],
        lambda family, kind, method: family == "llama" and (kind, method) in OFTEN,
    ),
)
def test_greedy_ids_are_plain_decodings(family: str, kind: str, method: str) -> None:
    """Close logits, so that one differing bit would show."""
    made = Rounded(kind, method, module_of(family, 96, 0.05))
    rounds = list(made.run(SamplingParams(max_new_tokens=40)).rounds())
    assert ids_of(rounds) == made.greedy(40)
    assert sum(len(round_.draft.tokens) for round_ in rounds) > 20


@pytest.mark.parametrize(
    ("family", "kind", "method", "cut"),
    some(
        [*product(FAMILIES, KINDS, METHODS, ("", "top_p"))],
        lambda family, kind, method, cut: family == "llama" and not cut and (kind, method) in OFTEN,
    ),
)
def test_all_paths_together_have_the_targets_distribution(
    family: str, kind: str, method: str, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Rounded(kind, method, module_of(family, 3, 0.4))
    warp: dict[str, Any] = {"top_p": 0.9} if cut else {}
    # so that no token is nearly sure
    temperature = round(1.2 * float(made.row(PROMPT).std()), 1)
    sampling = SamplingParams(max_new_tokens=3, temperature=temperature, **warp)
    wanted: Any = SimpleNamespace(row=cache(lambda *ids: made.row(ids)))
    reference: Any = SimpleNamespace(row=lambda ids: wanted.row(*ids))
    expected = exact(reference, sampling, 3)
    found = Paths(monkeypatch).of_rounds(
        lambda: states(made.name, made.settings, made.target, made.draft, sampling)
    )
    assert total_variation(found, expected) < ROUNDING
    assert max(found.values()) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [*product(KINDS, METHODS)])
def test_the_first_tokens_have_the_targets_distribution(kind: str, method: str) -> None:
    made = Rounded(kind, method, module_of("llama", 8, 0.4))
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_k=6)
    counts = Counter(first_tokens(made.run(sampling, seed)) for seed in range(2000))
    expected = output_distribution(
        lambda new: token_sampling.warp(made.row([*PROMPT, *new]), sampling).tolist(), TOKENS
    )
    assert p_value(counts, expected) > SIGNIFICANCE
