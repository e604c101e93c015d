"""Every model runner: calls in any order, on any contexts, also interrupted ones, give what a
runner with an empty cache gives.

To add a runner, add a function to `KINDS` that makes it. What an empty cache gives is compared with
transformers, or with the definition of a head, in the tests of each kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from families import IS_OLD_TRANSFORMERS, exit_layers_of, make_model, model_of
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from native_models import BOUNDARY, make, save, variant
from native_models import load as load_variant
from part_references import Part
from runner_checks import CPU, OTHER, InterruptAt, four_layers, nodes_to, random_path
from static_checks import RecordedGraphs, random_model
from translated_pairs import permuted

import specgen
from specgen import demo
from specgen.base.skipped_layers import SkippedLayers
from specgen.base.types import Context
from specgen.engine.block_runner import PardRunner
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.graphs import Captures
from specgen.engine.native.native_model import load_native
from specgen.engine.parts import own_layers
from specgen.engine.parts.own_layers import ExitWeights, LayerSkippingRunner
from specgen.engine.parts.part import FeatureRunner


class Made(NamedTuple):
    """Runners that share what they have cached, and what empties it. A draft has fewer than
    `deepest` levels."""

    runners: Sequence[Any]
    clear: Callable[[], None]
    deepest: int = 99
    longest: int = 70


def single(runner: Any, longest: int = 70) -> Made:
    return Made([runner], runner.clear_cache, longest=longest)


@cache
def module(family: str) -> Any:
    return make_model(family, **four_layers(family))


@cache
def model(family: str, backend: str = "native") -> Any:
    return model_of(module(family), backend)


@cache
def loaded(
    family: str, index: int, *, devices: tuple[torch.device, ...] = (), **options: Any
) -> Any:
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(make(variant(family, index)), folder)
        if not devices:
            return load_variant(folder, **options)
        architecture = read_architecture(read_config(folder, "a test's"))
        return load_native(
            folder, "a test's", architecture, torch.float32, devices[-1], layer_devices=devices
        )


def native(family: str, index: int, **options: Any) -> Made:
    made = loaded(family, index, **options)
    return single(ModelRunner(made), BOUNDARY - 6 if made.shape.rope_boundary else 70)


def graphs(
    family: str, *, is_exact: bool = False, is_captured: bool = True, **changes: Any
) -> Made:
    """Static passes, whose operators are recorded and replayed on the same storages, as a CUDA
    graph does."""
    made = random_model(family, **changes)
    made.exact = is_exact
    made.captures = Captures(capture=RecordedGraphs() if is_captured else None)
    return single(ModelRunner(made))


def eager(family: str, **changes: Any) -> Made:
    return single(ModelRunner(random_model(family, **changes)))


def exiting(family: str, backend: str) -> Made:
    target = model(family, backend)
    made = own_layers.make_runners(
        ExitWeights(exit_layers_of(target, module(family)), 2), target, None, lambda: None
    )
    return Made([made.draft, made.target], made.clear_cache)


def skipping(family: str, backend: str) -> Made:
    target = ModelRunner(model(family, backend))
    made = LayerSkippingRunner(target, model(family, backend), SkippedLayers.parse("1+2a", 4))

    def clear() -> None:
        target.clear_cache()
        made.clear_cache()

    return Made([target, made], clear)


def features(family: str) -> Made:
    return single(
        FeatureRunner(
            model(family), model(family).forward(taps=(0, 2, 4)), model(family).new_cache()
        )
    )


def head(layout: str, deepest: int = 99, **options: Any) -> Made:
    made = Part(layout, **options).made
    runners = [made.draft] if layout.startswith("medusa") else [made.target, made.draft]
    return Made(runners, made.clear_cache, deepest)


@cache
def translating_pair() -> Any:
    folder = TemporaryDirectory()
    return specgen.load(
        str(demo.folder("target")),
        str(permuted(Path(folder.name) / "draft")),
        device="cpu",
        dtype="float32",
    ), folder


def translated() -> Made:
    pair, _ = translating_pair()
    return single(pair.draft.draft_runner())


def placed(family: str) -> Made:
    return single(ModelRunner(loaded(family, 0, devices=(CPU, CPU, OTHER, OTHER))))


def pard(family: str) -> Made:
    runner = PardRunner(ModelRunner(model(family)), 2)
    return Made([runner], runner.clear_cache)


class Kind(NamedTuple):
    """`make` makes the runners, `reference` those with an empty cache, by default the same."""

    make: Callable[[], Made]
    reference: Callable[[], Made] | None = None
    examples: int = 7


SLIDING = {"sliding_window": 12, "sliding_window_pattern": 2}
KINDS = {
    "native": Kind(partial(native, "llama", 0), examples=14),
    "native windows": Kind(partial(native, "gemma3_text", 0)),
    "native caps": Kind(partial(native, "gemma2", 0)),
    "native LongRoPE": Kind(partial(native, "phi3", 0)),
    "native without rotation": Kind(partial(native, "smollm3", 1)),
    "native exact": Kind(partial(native, "qwen3", 1, exact=True)),
    "native packed": Kind(partial(native, "olmo2", 0, pack=True)),
    "graphs": Kind(partial(graphs, "llama"), partial(eager, "llama")),
    "graphs windows": Kind(
        partial(graphs, "gemma3_text", **SLIDING), partial(eager, "gemma3_text", **SLIDING)
    ),
    "graphs of one width": Kind(partial(graphs, "qwen3", is_exact=True), partial(eager, "qwen3")),
    "static passes": Kind(partial(graphs, "gemma2", is_captured=False), partial(eager, "gemma2")),
    "transformers": Kind(lambda: single(ModelRunner(model("llama", "transformers")))),
    "transformers windows": Kind(lambda: single(ModelRunner(model("gemma2", "transformers")))),
    "transformers GPT-2": Kind(lambda: single(ModelRunner(model("gpt2", "transformers")))),
    "delta rule": Kind(lambda: single(ModelRunner(model("qwen3_5_text"))), examples=32),
    "delta rule on transformers": Kind(
        lambda: single(ModelRunner(model("qwen3_5_text", "transformers")))
    ),
    "delta rule by channels": Kind(
        lambda: single(ModelRunner(model("kimi_linear", "transformers")))
    ),
    "Mamba2": Kind(lambda: single(ModelRunner(model("nemotron_h", "transformers")))),
    "short convolutions natively": Kind(lambda: single(ModelRunner(model("lfm2")))),
    "layers of a hybrid skipped": Kind(partial(skipping, "qwen3_5_text", "native")),
    "short convolutions": Kind(lambda: single(ModelRunner(model("lfm2_moe", "transformers")))),
    "transformers Cohere": Kind(lambda: single(ModelRunner(model("cohere", "transformers")))),
    "early exit": Kind(partial(exiting, "llama", "native")),
    "early exit on transformers": Kind(partial(exiting, "llama", "transformers")),
    "layers skipped": Kind(partial(skipping, "gemma2", "native")),
    "layers skipped on transformers": Kind(partial(skipping, "llama", "transformers")),
    "features": Kind(partial(features, "qwen3")),
    # its predictions as inputs amplify roundings
    "eagle1": Kind(partial(head, "eagle1", 4, head_layers=2)),
    "eagle3": Kind(partial(head, "eagle3", 4)),
    "mtp": Kind(partial(head, "mtp-deepseek", 4, layers=1)),
    "mtp of three layers": Kind(partial(head, "mtp-deepseek", 2, layers=3)),
    "glide": Kind(partial(head, "glide", head_layers=2)),
    "glide on transformers": Kind(partial(head, "glide", head_layers=2, backend="transformers")),
    "medusa": Kind(partial(head, "medusa-v0.1", 3)),
    "block": Kind(partial(head, "block-zlab", 4, head_layers=2, qk_norm=True)),
    "block with a Markov head": Kind(partial(head, "block-deepspec", 4)),
    "block with a selector": Kind(partial(head, "block-dflash2", 4, head_layers=2, causal=False)),
    "pard": Kind(partial(pard, "qwen3")),
    "translated": Kind(translated),
    "placed": Kind(partial(placed, "gemma3_text"), partial(native, "gemma3_text", 0)),
}
if IS_OLD_TRANSFORMERS:  # its recurrent layers run no trees
    for _name in (
        "delta rule on transformers",
        "delta rule by channels",
        "Mamba2",
        "short convolutions",
    ):
        del KINDS[_name]


@cache
def reference(kind: Kind) -> Made:
    return (kind.reference or kind.make)()


class Calls(RuleBasedStateMachine):
    """Calls of the runners of one kind on two contexts."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.made = kind.make()
        self.reference = reference(kind)
        self.contexts = [Context([1, 5, 6, 7]), Context([1, 5, 6])]

    @rule(
        which=st.tuples(st.integers(0, 1), st.integers(0, 1)),
        drawn=st.integers(0, 2**32),
        begun=st.integers(0, 4),
        line=st.none() | st.integers(1, 300),
        accepted=st.none() | st.integers(0, 99),
    )
    def call(
        self,
        which: tuple[int, int],
        drawn: int,
        begun: int,
        line: int | None,
        accepted: int | None,
    ) -> None:
        """A chain or a tree, which may grow in two calls. The first of them may be interrupted at a
        line. Then a path of it may be accepted, with a token after it."""
        rng = random.Random(drawn)
        tokens = [rng.randrange(3, 40) for _ in range(rng.randrange(8))]
        at = which[0]
        number = which[1] % len(self.made.runners)
        if len(self.contexts[at]) + len(tokens) > self.made.longest:
            self.contexts[at] = Context(self.contexts[at].ids[:9])
        runner = self.made.runners[number]
        tokens = tokens[: self.made.deepest - 1]
        is_chain = rng.random() < 0.5
        parents = [node - 1 if is_chain else rng.randrange(-1, node) for node in range(len(tokens))]
        begun = min(begun, len(tokens))
        context = self.contexts[at]
        if line is not None:
            with InterruptAt(line):
                try:
                    runner.logits(context, tokens[:begun], parents[:begun])
                except KeyboardInterrupt:
                    begun = 0
        elif begun and rng.random() < 0.75:  # else the logits from there on are asked for at once
            runner.logits(context, tokens[:begun], parents[:begun])
        found = runner.logits(context, tokens, parents, start=begun).logits
        assert len(found) == len(tokens) + 1 - begun
        # those from which nothing grows; the first of them may lie before what was asked for
        leaves = sorted({*range(begun - 1, len(tokens))} - {*parents}) or [begun - 1]
        for leaf in rng.sample(leaves, min(2, len(leaves))):
            self.check(found, number, context, tokens, parents, leaf, begun)
        if accepted is not None:
            path = random_path(random.Random(accepted), parents)
            self.extend(at, [*(tokens[node] for node in path), 3 + accepted % 30])
            for number, runner in list(enumerate(self.made.runners))[:: 1 if accepted % 2 else -1]:
                found = runner.logits(self.contexts[at]).logits
                self.check(found, number, self.contexts[at], [], [], -1, 0)

    def check(
        self,
        found: torch.Tensor,
        which: int,
        context: Context,
        tokens: list[int],
        parents: list[int],
        leaf: int,
        start: int,
    ) -> None:
        """The logits after the nodes on the path to `leaf`, as far as `found` has them: it begins
        with row `start`."""
        nodes = nodes_to(parents, leaf)
        rows = [node + 1 - start for node in (-1, *nodes) if node + 1 >= start]
        self.reference.clear()
        same = Context(context.ids[: context.prompt_length])
        same.extend(context.ids[context.prompt_length :])
        expected = (
            self.reference.runners[which]
            .logits(same, [tokens[node] for node in nodes])
            .logits[-len(rows) :]
            .cpu()
        )
        largest = float(expected[expected.isfinite()].abs().max())
        torch.testing.assert_close(
            found[rows].cpu(), expected, rtol=1e-4, atol=1e-4 * max(largest, 2.0)
        )

    @rule(at=st.integers(0, 1), drawn=st.integers(0, 2**32))
    def extend_far(self, at: int, drawn: int) -> None:
        """Many tokens at once, which are run in several passes."""
        rng = random.Random(drawn)
        self.extend(at, [rng.randrange(3, 40) for _ in range(rng.randrange(8, 31))])

    def extend(self, at: int, tokens: list[int]) -> None:
        if len(self.contexts[at]) + len(tokens) > self.made.longest:
            self.contexts[at] = Context([1, 5, *tokens[:2]])
        self.contexts[at].extend(tokens)

    @rule(at=st.integers(0, 1), count=st.integers(0, 5), first=st.integers(1, 3))
    def change(self, at: int, count: int, first: int) -> None:
        """Another context, which shares its beginning with the one before, or all but its first
        token."""
        ids = self.contexts[at].ids
        self.contexts[at] = Context([first, *ids[1 : max(2, len(ids) - count)]])

    @precondition(lambda self: len(self.contexts[0]) > 12)
    @rule()
    def empty(self) -> None:
        self.made.clear()


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are run in chunks, buffers grow and move, and records are folded into states."""
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 11)
    for name, number in {"BLOCK": 4, "KEPT": 3, "_MOST": 6, "_ROOM": 10}.items():
        monkeypatch.setattr(f"specgen.engine.native.recurrent_states.{name}", number)


@pytest.mark.parametrize("name", KINDS)
def test_calls_in_any_order_give_what_an_empty_cache_gives(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name.startswith("graphs"):  # of torch's operators alone
        request.getfixturevalue("without_kernels")
    run_state_machine_as_test(
        partial(Calls, KINDS[name]),
        settings=settings(
            max_examples=KINDS[name].examples,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a failure is shown as it was found: at most ten calls
        ),
    )


@pytest.mark.parametrize(
    ("family", "backend"), [("qwen3_5_text", "native"), ("lfm2_moe", "transformers")]
)
def test_recurrent_layers_go_back_to_any_length(family: str, backend: str) -> None:
    """Also to those before what was folded, and after a prompt's pass that ended before its last
    layer."""
    made = model(family, backend)
    ids = [1, *(5 + 7 * number % 31 for number in range(39))]
    kept = Context(ids[:20])
    runner = ModelRunner(made)
    expected = made.reference_logits(ids)

    def check(context: Context) -> None:
        torch.testing.assert_close(
            runner.logits(context).logits[0], expected[len(context) - 1], rtol=1e-3, atol=1e-3
        )

    for length in (*range(21, 41), *range(39, 0, -2), *range(1, 41, 3)):
        check(kept if length == 21 else Context(ids[:length]))
        kept.extend(ids[len(kept) : len(kept) + 1])
        check(kept)
    for line in range(40, 1200, 60):
        runner.clear_cache()
        with InterruptAt(line), suppress(KeyboardInterrupt):
            runner.logits(kept)
        check(kept)
