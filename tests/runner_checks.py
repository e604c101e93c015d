"""Checks of model runners against forward passes without a cache, interruptions at any line, and
counts of tokens run."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from families import BACKENDS, FAMILIES, HYBRIDS, IS_OLD_TRANSFORMERS, MIXTURES, NATIVE

from specgen.base.types import Context
from specgen.engine.model import Model
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_stack import LayerStack
from specgen.engine.native.native_model import NativeModel
from specgen.engine.parts.own_layers import ExitLayers
from specgen.engine.transformers.transformers_model import TransformersModel

RUN_BY = [
    (family, backend)
    for family in FAMILIES
    for backend in BACKENDS
    if family in NATIVE or backend != "native"
]
# which families a backend can run layer by layer: transformers those that compute nothing between
# the layers
LAYERED = [
    pair
    for pair in RUN_BY
    if pair[1] == "native" or (pair[0] in NATIVE and pair[0] not in ("gemma3_text", "granite"))
]
LAYERED = [pair for pair in LAYERED if pair[0] not in MIXTURES]  # which cannot have exit layers
HYBRID = [
    *((family, "transformers") for family in HYBRIDS if not IS_OLD_TRANSFORMERS),
    ("qwen3_5_text", "native"),
    ("qwen3_5_moe_text", "native"),
    ("qwen3_next", "native"),
    ("lfm2", "native"),
    ("lfm2_moe", "native"),
]
TOLERANCE = 2e-4
# torch computes on both alike, and specgen takes them for two devices
CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)


def quick(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns pytest parameters for `cases`, which begin with a family and a backend. Of the native
    families, each backend runs a sample by default; the others are marked slow.

    It is for tests of what the backends have in common. `test_model_runner.py` and
    `test_lossless.py` test all families on both backends without it.
    """
    often = {
        "native": {"llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3"},
        "transformers": {"llama", "gemma2"},
    }
    return [
        pytest.param(
            *case,
            marks=() if case[0] not in NATIVE or case[0] in often[case[1]] else pytest.mark.slow,
        )
        for case in cases
    ]


def few(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns pytest parameters for `cases`, which begin with a family and a backend, for tests
    that depend little on the family.

    By default Llama runs on both backends, a family with a sliding window and one with soft caps on
    the native one, and GPT-2 on transformers. The others are marked slow.
    """
    often = {
        ("llama", "native"),
        ("llama", "transformers"),
        ("phi3", "native"),
        ("gemma2", "native"),
        ("gpt2", "transformers"),
    }
    return [
        pytest.param(*case, marks=() if case[:2] in often else pytest.mark.slow) for case in cases
    ]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Returns pytest parameters for `cases`. The first of each `step` cases runs by default; the
    others are marked slow."""
    return [
        pytest.param(case, marks=pytest.mark.slow if number % step else ())
        for number, case in enumerate(cases)
    ]


def uncached(module: Any, ids: list[int]) -> torch.Tensor:
    """The logits [vocabulary] after `ids`, by a forward pass of transformers' model `module`
    without a cache."""
    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0, -1]


def nodes_to(parents: list[int], node: int) -> list[int]:
    """The nodes on the path from a tree's root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens on the path from a tree's root to `node`."""
    return [tokens[each] for each in nodes_to(parents, node)]


def check(
    module: Any,
    logits: torch.Tensor,
    context: Context,
    tokens: list[int],
    parents: list[int],
    start: int = 0,
) -> None:
    """Assert that a runner's logits are those of transformers' model `module` without a cache.

    `logits` [1 + nodes - start, vocabulary] are those after the context and after each node of the
    tree (`tokens`, `parents`), from row `start` on.
    """
    assert logits.shape[0] == len(tokens) + 1 - start
    # a pass over a path gives the logits after each of its nodes
    for leaf in sorted({*range(len(tokens))} - {*parents}) or [-1]:
        nodes = nodes_to(parents, leaf)
        ids = context.ids + [tokens[node] for node in nodes]
        with torch.no_grad():
            rows = module(torch.tensor([ids]), use_cache=False).logits[0, len(context) - 1 :]
        for node, expected in zip([-1, *nodes], rows, strict=True):
            if node + 1 >= start:
                found = logits[node + 1 - start]
                assert torch.allclose(found, expected, atol=TOLERANCE, rtol=1e-4), node + 1


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """The tokens and the parents of a random tree with `size` nodes."""
    return [rng.randrange(3, 40) for _ in range(size)], [
        rng.randrange(-1, node) for node in range(size)
    ]


def random_path(rng: random.Random, parents: list[int]) -> list[int]:
    """The nodes of a random path in a tree, from the root down, as if verification had accepted
    them."""
    path: list[int] = []
    node = -1
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.25:
            break
        node = rng.choice(children)
        path.append(node)
    return path


def four_layers(family: str) -> dict[str, Any]:
    """Changes of a family's config that give it four layers."""
    config = {**FAMILIES, **HYBRIDS}[family]()
    lists = {name: getattr(config, name, None) for name in ("layer_types", "no_rope_layers")}
    four = {
        name: [entries[index % len(entries)] for index in range(4)]
        for name, entries in lists.items()
        if entries
    }
    return {"num_hidden_layers": 4, **four}


class CountedLayers:
    """Counts the tokens that each layer of a model, and each layer of its exit layer, is run on:
    `tokens`, by the layer's name.

    Only runners that are made afterwards are counted.
    """

    def __init__(self, model: Model, exit_layers: ExitLayers | None = None) -> None:
        self.tokens: Counter[str] = Counter()
        if exit_layers is not None:
            exit_layers._layers = LayerStack(self._counted("exit ", exit_layers._layers._layers))
        if isinstance(model, NativeModel):
            model.layers = self._counted("", model.layers)
        else:
            assert isinstance(model, TransformersModel)
            for index, layer in enumerate(model.module.model.layers):
                layer.register_forward_pre_hook(self._count(str(index)), with_kwargs=True)

    def _counted(self, prefix: str, layers: Sequence[NativeLayer]) -> Any:
        return [
            _CountedLayer(layer, f"{prefix}{index}", self.tokens)
            for index, layer in enumerate(layers)
        ]

    def _count(self, name: str) -> Any:
        def count(_: Any, args: Any, __: Any) -> None:
            self.tokens[name] += args[0].shape[1]

        return count


class _CountedLayer:
    """A native layer that counts the tokens that it is run on, without padding."""

    def __init__(self, layer: NativeLayer, name: str, tokens: Counter[str]) -> None:
        self._layer = layer
        self._name = name
        self._tokens = tokens

    def __call__(self, hidden: torch.Tensor, inputs: PassInputs, **options: Any) -> torch.Tensor:
        self._tokens[self._name] += inputs.written
        return self._layer(hidden, inputs, **options)

    def for_kernels(self, **_: Any) -> None:
        """Returns None: then the layer is called by itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


TRACED = tuple(
    f"engine/{name}.py"
    for name in (
        "block_runner",
        "cached_prefix",
        "model_runner",
        *(
            f"parts/{name}"
            for name in ("part", "own_layers", "eagle", "mtp", "glide", "medusa", "block")
        ),
        "transformers/kv_cache",
        "transformers/transformers_model",
        "transformers/recurrent_layers",
        *(
            f"native/{name}"
            for name in (
                "kv_buffer",
                "layer_stack",
                "rotary",
                "inputs",
                "native_model",
                "layer",
                "mlp",
                "recurrence",
            )
        ),
    )
)


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of the code in `files`, as Ctrl-C may."""

    def __init__(self, line: int, files: tuple[str, ...] = TRACED) -> None:
        self.left = line
        self._files = files

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
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
