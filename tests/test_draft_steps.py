"""Tokens that are chosen on the device, in captured draft steps, are those that the host would choose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_checks import (  # noqa: F401
    DEVICES,
    GREEDY,
    POLICIES,
    SAMPLED,
    Margins,
    assert_close,
    compare_drafters,
    draft_setup,
    graphs_on,
    nothing_falls_back,
    on_gpu,
    runners_of,
)
from static_checks import HostReads, random_model, random_tokens
from torch.nn.attention import sdpa_kernel

import specgen
from specgen.base.errors import RunError
from specgen.base.types import Context, SamplingParams
from specgen.methods.bild_drafting import BildDrafter
from specgen.methods.cape import CapeDrafter
from specgen.decoding.drafting import Setup, ModelDrafter
from specgen.decoding.policy import LengthPolicy
from specgen.methods.svip import SVIP
from specgen.decoding.policy import Fixed
from specgen.engine import model_loading
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import cuda_graphs, static_forward
from specgen.engine.native.loading import load_native
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.pair.pair import Pair


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_give_the_drafters_tokens_and_signals(sampling: SamplingParams) -> None:
    """Over rejections, ends of sequence, a bucket's end (512 entries), rows that are used again and a cache that grows."""
    eager, captured = runners_of("gemma3_text", "cpu", torch.float32)
    assert captured.chooses_on_device()
    captured.reserve(560)
    reasons, buckets, buffers = set(), set(), set()
    for index, (name, policy) in enumerate(POLICIES.items()):
        eos = () if name == "long" else range(4 + index, 96, 9)
        prompt = 590 if name == "long" else 495
        drafts = compare_drafters(eager, captured, sampling, policy, rounds=4, prompt=prompt, eos=eos)
        reasons |= {(draft.stop_reason or "")[:3] for draft in drafts}
        buckets |= {bucket for _, bucket, _ in captured._forward._self_feeding}
        buffers.add(captured.cache.data.data_ptr())
    assert reasons > {"eos", "len", "ban", "√cH"}
    assert len(buffers) == 2
    assert len(buckets) > 1


@pytest.mark.parametrize(("vocab_size", "family"), [(60, "llama"), (130, "phi3")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_for_a_target_with_another_vocabulary(vocab_size: int, family: str, sampling: SamplingParams) -> None:
    eager, captured = runners_of(family, "cpu", torch.float32)
    options: dict[str, Any] = {"rounds": 5, "vocab_size": vocab_size}
    drafts = compare_drafters(eager, captured, sampling, POLICIES["fixed"], **options)
    drafts += compare_drafters(eager, captured, sampling, POLICIES["fixed"], kind=CapeDrafter, eos=range(4, 60, 4), **options)
    assert not drafts[-1].is_chain
    assert all(token < vocab_size for draft in drafts for token in draft.tokens)
    assert {is_long for *_, is_long in captured._forward._self_feeding} == {family == "phi3"}


def test_draft_steps_of_bild_and_of_a_target_without_some_layers() -> None:
    eager, captured = runners_of("llama", "cpu", torch.float32)
    drafts = compare_drafters(eager, captured, GREEDY, POLICIES["fixed"], rounds=8, kind=lambda setup: BildDrafter(setup, 0.065))
    assert any((draft.stop_reason or "").startswith("unsure") and draft.tokens for draft in drafts)
    skips, runners = SkippedLayers(frozenset({1}), frozenset({3})), []
    for is_captured in (False, True):
        model = random_model("llama")
        if is_captured:
            use_static_passes(model, new_graphs=graphs_on("cpu"))
        target = ModelRunner(model)
        runners.append(LayerSkippingRunner(target, model, skips))
    assert runners[1].chooses_on_device()
    compare_drafters(runners[0], runners[1], GREEDY, POLICIES["svip"], rounds=6)


@pytest.mark.parametrize(("policy", "reads"), [("fixed", 1), ("long", 2), ("svip", 6)])
def test_the_host_reads_once_a_draft_or_where_the_policy_decides_once_a_token(
    policy: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StaticPass._write
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter = ModelDrafter(draft_setup(captured, SAMPLED, eos=()))
    context = Context(random_tokens(random.Random(7), 30))
    make: Callable[[], LengthPolicy] = POLICIES[policy] if policy != "svip" else lambda: SVIP(10.0, 0.15, 6)
    for _ in range(2):  # captures the passes over one token, too
        drafter.propose(context, make(), 30)
        context.extend([3])
    loads: list[object] = []
    monkeypatch.setattr(StaticPass, "_write", lambda self, numbers: loads.append(write(self, numbers)))
    with HostReads() as host:
        draft = drafter.propose(context, make(), 30)
    assert len(draft.tokens) == {"fixed": 5, "long": 30, "svip": 6}[policy]
    assert host.count == reads
    assert len(loads) == 2  # the pass over the context's last token, and the first step: the others get nothing from the host


def test_each_token_is_shown_as_soon_as_it_is_drafted_and_a_draft_can_be_ended() -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter, context = ModelDrafter(draft_setup(captured, GREEDY)), Context(random_tokens(random.Random(7), 30))
    whole = drafter.propose(context, Fixed(5), 30)
    shown: list[int] = []
    draft = drafter.propose(context, Fixed(5), 30, whole.tokens[:1], lambda _, token: shown.append(token) or len(shown) < 3)
    assert draft.stop_reason == "pass ended"
    assert shown == draft.tokens == whole.tokens[1:4]


def test_what_the_host_has_to_decide_is_not_run_on_the_device() -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    policy = Fixed(3)
    assert ModelDrafter(draft_setup(captured, GREEDY))._device_chain(Context([3]), [], policy, is_shown=False) is not None
    recording = Setup(captured, GREEDY, vocab_size=96, keep_logits=True)
    assert ModelDrafter(recording)._device_chain(Context([3]), [], policy, is_shown=False) is None
    model = random_model("llama")
    use_static_passes(model, new_graphs=graphs_on("cpu"))
    penalised = ModelRunner(model, penalties=lambda logits, *_: logits)  # type: ignore[arg-type]
    assert not penalised.chooses_on_device()
    exits = ModelRunner(model, forward=model.layers_forward([], lambda _: torch.zeros(1, 64)))
    assert not exits.chooses_on_device()


def test_accepted_tokens_of_a_draft_are_not_run_again() -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter, context = ModelDrafter(draft_setup(captured, GREEDY, eos=())), Context(random_tokens(random.Random(7), 30))
    draft = drafter.propose(context, Fixed(5), 30)
    context.extend([*draft.tokens, 9])
    captured._cached.switch_to(context)
    assert captured._cached.committed == 34  # the last drafted token has not been run


def test_a_nan_in_the_drafts_logits_is_an_error_and_no_token() -> None:
    model = random_model("llama")
    use_static_passes(model, new_graphs=graphs_on("cpu"))
    context = Context(random_tokens(random.Random(7), 30))
    for sampling in (GREEDY, SAMPLED):
        drafter = ModelDrafter(draft_setup(ModelRunner(model), sampling))
        drafter.propose(context, Fixed(5), 30)
        norm = model.parts.norm.clone()
        model.parts.norm.fill_(float("nan"))
        context.extend([3])
        with pytest.raises(RunError, match="NaN"):
            drafter.propose(context, Fixed(5), 30)
        model.parts.norm.copy_(norm)


def test_rules_beyond_the_limit_drop_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_forward, "_MAX_RULES", 3)
    eager, captured = runners_of("llama", "cpu", torch.float32)
    for temperature in range(1, 6):
        sampling = SamplingParams(temperature=temperature / 5)
        compare_drafters(eager, captured, sampling, POLICIES["fixed"], rounds=1)
    assert 1 <= len(captured._forward._choices) <= 3


_SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("svip", "selfsd", "specinfer", "spectr", "bild", "mtad")]


@pytest.mark.parametrize("method", ["sd", "eesd", "pearl", *_SLOW])
def test_runs_on_captured_passes_give_plain_decodings_text(method: str, demo_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def load(*args: Any, **options: Any) -> NativeModel:
        model = load_native(*args, **options)
        use_static_passes(model, new_graphs=graphs_on("cpu", counts))
        return model

    monkeypatch.setattr(model_loading, "load_native", load)
    pair = specgen.load(device="cpu", dtype="float32")
    pair._process_worker = None
    ids = pair.tokenizer.encode("User: What is the capital of Japan?\nAssistant:")
    settings: dict[str, Any] = {"selfsd": {"skip": "1"}, "pearl": {"window": 3}}.get(method, {})
    found = pair.generate(ids, method, SamplingParams(max_new_tokens=24), **settings).token_ids
    assert found == demo_pair.generate(ids, "ar", SamplingParams(max_new_tokens=24)).token_ids
    assert counts["replays"] > counts["captures"] > 0


class _Uncaptured:
    """Repeats the work itself."""

    def capture(self, work: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        return work


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_on_a_gpu_give_the_tokens_of_uncaptured_ones(sampling: SamplingParams, dtype: torch.dtype) -> None:
    """In float32 also those of eager passes, whose tokens the host chooses."""
    model = random_model("llama", dtype, "cuda:0")
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=_Uncaptured)
    uncaptured = ModelRunner(model)
    use_static_passes(model, new_graphs=graphs_on("cuda:0"))
    captured = ModelRunner(model)
    assert captured.chooses_on_device()
    with sdpa_kernel(cuda_graphs._ATTENTION):  # as captures choose it
        for policy in POLICIES.values():
            compare_drafters(uncaptured, captured, sampling, policy, rounds=6, prompt=495, eos=range(4, 96, 9))
            if dtype == torch.float32:
                compare_drafters(eager, captured, sampling, policy, rounds=6, prompt=495, eos=range(4, 96, 9))


@on_gpu
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_neither_a_pass_nor_a_deferred_draft_waits_for_the_gpu(sampling: SamplingParams) -> None:
    _, captured = runners_of("llama", "cuda:0", torch.bfloat16)
    drafter, context = ModelDrafter(draft_setup(captured, sampling)), Context(random_tokens(random.Random(7), 30))
    for is_checked in (False, True):  # the first time, they are captured
        torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
        try:
            captured.logits(context, [3, 4, 5])
            captured.logits(context, [3, 4, 5, 6, 7], [-1, 0, 0, 2, -1])
            chain = drafter._device_chain(context, [], Fixed(5), is_shown=False)
            assert chain is not None
            for _ in range(5):
                chain.append()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(chain.draft("limit 5").tokens) == 5
        context.extend([9])
