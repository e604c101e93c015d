"""Heads on captured passes draft what they draft on eager ones, read by the host as rarely as the policy allows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from eagle_heads import random_head
from graph_checks import (  # noqa: F401
    GREEDY,
    POLICIES,
    SAMPLED,
    assert_close,
    compare_drafters,
    draft_setup,
    graphs_on,
    nothing_falls_back,
    on_gpu,
)
from kernel_checks import interpreted, triton_kernels
from native_configs import sparse
from scripted_models import scripted_run
from static_checks import HostReads, RecordedGraphs, random_calls, random_model, random_tokens

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import ModelDrafter
from specgen.decoding.policy import Fixed
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import static_forward
from specgen.engine.native.kernels.kernel_set import KernelSet
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.engine.parts import eagle_runner, glide_runner
from specgen.engine.parts.eagle_runner import EagleRunner
from specgen.engine.parts.head_runners import HeadRunners
from specgen.engine.parts.weights import EagleWeights, GlideWeights

_HEADS: dict[str, dict[str, Any]] = {
    "1": {"version": 1, "biases": True, "layers": 2},
    "3": {"version": 3, "vocabulary": [*range(3, 60), 77], "qk_norm": True, "norm_before_residual": True},
}


def eagle_head(name: str) -> EagleWeights:
    """A random head of width 64, whose predictions do not amplify rounding errors from token to token."""
    head = random_head(width=64, **_HEADS[name])
    small = {key: tensor / 2 if "_proj" in key or key == "fc.weight" else tensor for key, tensor in head.tensors.items()}
    return replace(head, tensors=small)


def both(
    head: EagleWeights | GlideWeights, counts: Counter[str] | None = None, device: str = "cpu", **changes: Any
) -> list[HeadRunners]:
    """Runners that run eagerly, and such that replay captured passes."""
    made = []
    for is_captured in (False, True):
        model = random_model("llama", torch.float32, device, **changes)
        if is_captured:
            use_static_passes(model, new_graphs=graphs_on(device, counts))
        if isinstance(head, EagleWeights):
            made.append(eagle_runner.make_runners(head, model, ModelRunner(model), lambda: None))
        else:
            made.append(glide_runner.make_runners(head, model, ModelRunner(model), lambda: None))
    return made


@pytest.mark.parametrize("name", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_captured_eagle_passes_give_the_eager_logits(name: str) -> None:
    """With rollbacks, trees that grow by several levels, a bucket's end (512) and growth of the cache."""
    counts: Counter[str] = Counter()
    eager, captured = both(eagle_head(name), counts)
    for context, tokens, parents, start in random_calls(random.Random(1), 500, 6):
        expected = eager.draft.logits(context, tokens, parents, start=start)
        found = captured.draft.logits(context, tokens, parents, start=start)
        possible = expected.logits.isfinite()
        assert torch.equal(possible, found.logits.isfinite())
        assert_close(found.logits[possible], expected.logits[possible], 1e-4)
        assert expected.hidden_states is not None
        assert found.hidden_states is not None
        assert_close(found.hidden_states, expected.hidden_states, 1e-4)
    assert counts["captures"] < counts["replays"]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param(name, sampling, marks=() if name == "3" and sampling is GREEDY else pytest.mark.slow)
        for name in _HEADS
        for sampling in (GREEDY, SAMPLED)
    ],
)
def test_eagle_chains_and_trees_are_those_of_eager_passes(name: str, sampling: SamplingParams) -> None:
    eager, captured = both(eagle_head(name))
    options: dict[str, Any] = {"rounds": 2, "tolerance": 1e-4, "prompt": 500, "eos": range(4, 96, 9)}
    tree = partial(TopKTreeDrafter, width=4, depth=10, nodes=10)
    for policy in ("fixed", "margins"):
        compare_drafters(eager.draft, captured.draft, sampling, POLICIES[policy], **options)
        if sampling is GREEDY:
            compare_drafters(eager.draft, captured.draft, sampling, POLICIES[policy], kind=tree, **options)
    assert isinstance(captured.draft, EagleRunner)
    assert captured.draft.chooses_on_device()


@pytest.mark.parametrize(
    ("kind", "policy", "reads"),
    [("chain", "fixed", 1), pytest.param("tree", "fixed", 1, marks=pytest.mark.slow), ("tree", "margins", 5)],
)
def test_the_host_reads_an_eagle_draft_once_or_where_the_policy_decides_once_a_level(
    kind: str, policy: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured = both(eagle_head("3"))
    setup, context = draft_setup(captured.draft, GREEDY), Context(random_tokens(random.Random(7), 30))
    drafter = ModelDrafter(setup) if kind == "chain" else TopKTreeDrafter(setup, width=4, depth=5, nodes=10)
    for _ in range(3):  # the first times, they are captured
        captured.target.logits(context)
        context.extend([3])
        write, loads = StaticPass._write, list[object]()
        with HostReads() as host, monkeypatch.context() as patch:
            patch.setattr(StaticPass, "_write", lambda self, numbers, to=loads, write=write: to.append(write(self, numbers)))
            drafter.propose(context, Fixed(5) if policy == "fixed" else POLICIES["margins"](), 30)
    assert host.count == reads
    assert len(loads) == 2  # the pair of the context's last token, and the first token or level


@pytest.mark.parametrize(
    ("temperature", "version", "settings"),
    [
        pytest.param(0.0, 3, {"width": 7, "depth": 2, "nodes": 12}, marks=pytest.mark.slow),
        pytest.param(1.3, 3, {"width": 5, "depth": 3}, marks=pytest.mark.slow),
        (1.3, 1, {"width": 1, "k": 4}),
        pytest.param(1.3, 1, {"width": 1, "policy": "svip"}, marks=pytest.mark.slow),
    ],
)
def test_whole_runs_with_captured_heads_are_those_with_eager_ones(
    temperature: float, version: Any, settings: dict[str, object]
) -> None:
    size = 7  # tokens of a vocabulary in which random heads are often right
    sampling, rounds = SamplingParams(temperature=temperature, max_new_tokens=16), []
    for made in both(random_head(version, 64, size), vocab_size=size):
        run = scripted_run("eagle", settings, made.target, made.draft, sampling, prompt=[1, 5, 4, 2, 3, 6])
        rounds.append([(list(each.draft.tokens), each.verdict.path, each.verdict.token) for each in run.rounds()])
    assert rounds[0] == rounds[1]
    assert any(path for _, path, _ in rounds[0])


# ------------------------------------------------------------------ GliDe


def glide_head(layers: int, vocab_size: int = 96) -> GlideWeights:
    """A random draft model of width 24 for `random_model`, whose embedding and LM head are its own."""
    generator = torch.Generator().manual_seed(layers)
    config = sparse("llama", hidden_size=24, intermediate_size=40, num_hidden_layers=layers, head_dim=8, vocab_size=vocab_size)
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab_size, 24), "lm_head.weight": (vocab_size, 24)}
    for index in range(layers):
        prefix = f"layers.{index}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (rows, 24) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {f"{prefix}self_attn.o_proj.weight": (24, 32), f"{prefix}mlp.down_proj.weight": (24, 40)}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (40, 24) for name in ("gate", "up")}
        shapes |= {f"{prefix}cross_attn.q_proj.weight": (64, 24), f"{prefix}cross_attn.o_proj.weight": (24, 64)}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    for name in ("norm.weight", *(f"layers.{index}.{name}_layernorm.weight" for index in range(layers) for name in _NORMS)):
        tensors[name] = torch.ones(24)
    return GlideWeights(config, tensors)


_NORMS = ("input", "post_attention")


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_captured_glide_passes_and_drafts_are_the_eager_ones(layers: int) -> None:
    """Also while the target lacks tokens, for a context of one token, and after the target's cache has grown."""
    eager, captured = made = both(glide_head(layers))
    assert isinstance(captured.draft, ModelRunner)
    assert captured.draft.chooses_on_device()
    calls = [*random_calls(random.Random(2), 12, 5, 6), (Context([5]), [4, 6], [-1, -1], 0)]
    for step, (context, tokens, parents, start) in enumerate(calls):
        expected = eager.draft.logits(context, tokens, parents, start=start)
        assert_close(captured.draft.logits(context, tokens, parents, start=start).logits, expected.logits, 1e-5)
        if step % 3 == 0:  # otherwise the target lacks tokens at the next call
            for runners in made:
                runners.target.logits(context, tokens, parents)
    for kind in (ModelDrafter, partial(TopKTreeDrafter, width=3, depth=4)):
        compare_drafters(eager.draft, captured.draft, GREEDY, POLICIES["fixed"], kind=kind, rounds=2)
        cache: Any = captured.target.cache
        old = cache.data
        cache.enlarge(1500)
        old.fill_(9.0)  # must not be read any more
        compare_drafters(eager.draft, captured.draft, GREEDY, POLICIES["fixed"], kind=kind, rounds=1)


def test_the_host_reads_a_glide_draft_once() -> None:
    _, runners = both(glide_head(1))
    drafter, context = ModelDrafter(draft_setup(runners.draft, GREEDY)), Context(random_tokens(random.Random(7), 30))
    for _ in range(3):
        runners.target.logits(context)
        context.extend([3])
        with HostReads() as host:
            drafter.propose(context, Fixed(5), 30)
    assert host.count == 1


def test_heads_on_a_gpu_use_the_kernels_that_were_checked_for_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def checked(architecture: Any, *_: Any) -> KernelSet:
        asked.append(architecture)
        return replace(TORCH, gate=lambda *inputs: TORCH.gate(*inputs), finds_keys=True)

    monkeypatch.setattr(static_forward, "checked_kernels", checked)
    monkeypatch.setattr(static_forward, "CudaGraphs", lambda *_: RecordedGraphs(Counter()))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    model: Any = random_model("llama")
    static_forward.use_cuda_graphs(model)

    def model_of(make: Any, head: EagleWeights | GlideWeights) -> Any:
        return make(head, model, ModelRunner(model), lambda: None).draft._forward._eager.model

    eagle, again = (model_of(eagle_runner.make_runners, eagle_head("3")) for _ in range(2))
    glide = model_of(glide_runner.make_runners, glide_head(1))
    assert asked == [model.architecture, eagle.architecture, glide.architecture], "the same head is checked once"
    assert eagle.inputs.kernels is again.inputs.kernels is not model.inputs.kernels
    assert eagle.inputs.kernels.finds_keys
    assert glide.inputs.kernels.gate is not TORCH.gate
    assert (glide.inputs.kernels.attend, glide.inputs.kernels.finds_keys) == (TORCH.attend, False)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("head", ["1", "3", "glide"])
def test_heads_with_fused_kernels_give_the_eager_logits(head: str) -> None:
    """With rollbacks, trees and growth of the cache."""
    eager, captured = made = both(glide_head(1) if head == "glide" else eagle_head(head))
    inputs = captured.draft._forward._eager.model.inputs  # type: ignore[attr-defined]
    fused = triton_kernels().TRITON
    inputs.kernels = replace(fused, attend=TORCH.attend, finds_keys=False) if head == "glide" else fused
    for context, tokens, parents, start in random_calls(random.Random(2), 24, 3, 4):
        for runners in made:
            runners.target.logits(context)
        expected = eager.draft.logits(context, tokens, parents, start=start).logits
        found = captured.draft.logits(context, tokens, parents, start=start).logits
        possible = expected.isfinite()
        assert torch.equal(possible, found.isfinite())
        assert_close(found[possible], expected[possible], 1e-4)


@on_gpu
@pytest.mark.parametrize("kind", ["eagle", "glide"])
def test_heads_on_a_gpu_draft_what_they_draft_on_eager_passes(kind: str) -> None:
    eager, captured = both(eagle_head("3") if kind == "eagle" else glide_head(1), device="cuda:0")
    for policy in ("fixed", "margins"):
        for drafter in (ModelDrafter, partial(TopKTreeDrafter, width=4, depth=10, nodes=10)):
            options: dict[str, Any] = {"rounds": 3, "tolerance": 1e-3, "prompt": 500, "kind": drafter}
            compare_drafters(eager.draft, captured.draft, GREEDY, POLICIES[policy], **options)
