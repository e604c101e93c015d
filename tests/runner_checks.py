"""Checks of model runners against forward passes without a cache, interruptions at any line, and counts of tokens run."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import torch
from families import make_model
from specgen.engine.exit_layer import ExitLayer

from specgen.types import Context

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "olmo2")
TOLERANCE = 2e-4


def uncached(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits [vocabulary] after `ids`, by a forward pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens on the path from a tree's root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def check(model: Any, logits: torch.Tensor, context: Context, tokens: list[int], parents: list[int], start: int = 0) -> None:
    """Assert that a runner's logits, from index `start` on, are those of forward passes without a cache."""
    assert logits.shape[0] == len(tokens) + 1 - start
    for index in range(start, len(tokens) + 1):
        expected = uncached(model, context.ids + path_to(tokens, parents, index - 1))
        assert torch.allclose(logits[index - start], expected, atol=TOLERANCE, rtol=1e-4), index


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree."""
    return [rng.randrange(3, 40) for _ in range(size)], [rng.randrange(-1, node) for node in range(size)]


def random_path(rng: random.Random, parents: list[int]) -> list[int]:
    """Nodes from a tree's root down, as if they had been accepted."""
    path: list[int] = []
    node = -1
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.25:
            break
        node = rng.choice(children)
        path.append(node)
    return path


def four_layer_types(family: str) -> dict[str, Any]:
    """The config's `layer_types` for four layers, if the family's config has them."""
    types = getattr(make_model(family).config, "layer_types", None)
    return {"layer_types": [types[index % len(types)] for index in range(4)]} if types else {}


class CountedTokens:
    """Counts the tokens that a model is run on."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, args: Any, kwargs: Any) -> None:
        self.tokens += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1]


class CountedLayers:
    """Counts the tokens that each layer of a model and of its exit is run on."""

    def __init__(self, model: Any, layer: ExitLayer) -> None:
        self.tokens: Counter[str] = Counter()
        for name, found in [*enumerate(model.model.layers), *((f"exit {i}", own) for i, own in enumerate(layer.layers))]:
            found.register_forward_pre_hook(self._count(str(name)), with_kwargs=True)

    def _count(self, name: str) -> Any:
        def count(_: Any, args: Any, __: Any) -> None:
            self.tokens[name] += args[0].shape[1]

        return count


TRACED = tuple(f"engine/{name}.py" for name in ("model_runner", "cached_prefix", "kv_cache", "early_exit"))


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of the runners' or the cache's code, as Ctrl-C may."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> InterruptAt:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
