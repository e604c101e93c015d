"""Captured passes and draft steps give what eager ones give: on the CPU with recorded operators, on a GPU with CUDA graphs."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from static_checks import HostReads, RecordedGraphs, random_calls, random_model, random_tokens
from torch.nn.attention import sdpa_kernel

import specgen
from specgen.decoding.bild import BildDrafter
from specgen.decoding.drafters import DraftSetup, ModelDrafter
from specgen.decoding.length_policy import DraftedToken, LengthPolicy
from specgen.decoding.policies import SVIP, BetaTS, Confidence, Fixed
from specgen.engine import model_loading
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import cuda_graphs
from specgen.engine.native.cuda_graphs import CudaGraphs, Graphs
from specgen.engine.native.loading import load_native
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.static_forward import WIDTHS, use_cuda_graphs, use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.errors import RunError
from specgen.pair import Pair
from specgen.types import Context, Draft, SamplingParams

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, id="recorded"),
    pytest.param("cuda:0", torch.float32, 1e-4, id="cuda-float32", marks=CUDA),
    pytest.param("cuda:0", torch.bfloat16, 0.03, id="cuda-bfloat16", marks=CUDA),
]
_LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 12, "sliding_window_pattern": 2},
    "phi3": {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 20},
}


def _graphs(device: str, counts: Counter[str] | None = None) -> Callable[[], Graphs]:
    """What captures on this device: operators recorded on the CPU, CUDA graphs on a GPU."""
    return (
        partial(RecordedGraphs, Counter() if counts is None else counts)
        if device == "cpu"
        else partial(CudaGraphs, torch.device(device))
    )


def _pair(family: str, device: str, dtype: torch.dtype, seed: int = 0, counts: Counter[str] | None = None) -> tuple[Any, Any]:
    """Two runners of a random model: one runs eagerly, the other one replays captured passes."""
    model = random_model(family, dtype, device, seed, **_CHANGES.get(family, {}))
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=_graphs(device, counts))
    return eager, ModelRunner(model)


@pytest.fixture(autouse=True)
def _nothing_falls_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails if a capture failed that the test does not expect: without graphs, everything gives the same, too."""
    yield
    assert not [record.message for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max().clamp_min(1)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "stablelm"])
def test_captured_passes_give_the_eager_logits(family: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rollbacks, trees that grow, a bucket's end (512) and growth of the cache."""
    counts: Counter[str] = Counter()
    eager, captured = _pair(family, device, dtype, counts=counts)
    buffers, widths = set(), set()
    for context, tokens, parents, start in random_calls(random.Random(family), 478, 16):
        expected = eager.logits(context, tokens, parents, start=start)
        found = captured.logits(context, tokens, parents, start=start)
        _assert_close(found.logits, expected.logits, tolerance)
        _assert_close(found.hidden_states, expected.hidden_states, tolerance)
        buffers.add(captured.cache.data.data_ptr())
        widths |= {width for width, _, _ in captured._forward._passes}
    assert len(buffers) > 1
    assert widths == set(WIDTHS)
    if device == "cpu":
        assert counts["captures"] < counts["replays"]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES[:1] + DEVICES[2:])
def test_replays_use_the_same_buffers_and_drop_their_graphs_when_the_cache_grows(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    _, captured = _pair("llama", device, dtype)
    context, forward = Context(random_tokens(random.Random(1), 20)), captured._forward
    captured.logits(context)  # the prompt
    pointers = set()
    for _ in range(3):
        context.extend(random_tokens(random.Random(2), 1))
        logits = captured.logits(context).logits
        static = forward._passes[1, 512, False]
        pointers.add((static.logits.data_ptr(), static.inputs.data_ptr(), captured.cache.data.data_ptr()))
        assert logits.data_ptr() in pointers.copy().pop()
    assert len(pointers) == 1
    assert len(forward._replays) == 1
    old, graphs = static, forward._graphs
    captured.cache.enlarge(1000)
    captured.logits(Context([*context.ids, 3]))
    assert forward._passes[1, 512, False] is not old
    assert forward._graphs is not graphs
    assert len(forward._replays) == 1


class _Broken:
    """Graphs whose captures fail, some after they have run the work."""

    tries = 0

    def capture(self, work: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        type(self).tries += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_is_said_once_and_passes_run_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=_Broken)
    runners = ModelRunner(model), ModelRunner(model)
    for context, tokens, parents, start in random_calls(random.Random(5), 30, 6):
        expected = eager.logits(context, tokens, parents, start=start).logits
        for runner in runners:
            _assert_close(runner.logits(context, tokens, parents, start=start).logits, expected, 1e-5)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not be captured: operation not permitted" in caplog.text
    assert _Broken.tries == 1
    _compare_drafters(eager, runners[0], GREEDY, lambda: Fixed(5), rounds=4)
    caplog.clear()


def test_captures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, captured = _pair("llama", "cpu", torch.float32)
    context = Context(random_tokens(random.Random(1), 20))
    captured.logits(context)
    for _ in range(2):
        captured.logits(context, [3, 4])
    assert [record.message.rpartition(" in ")[0] for record in caplog.records] == [
        "captured passes of 4 tokens over 512 cache entries"
    ]


def test_without_a_gpu_a_model_is_neither_static_nor_chooses_tokens_itself(demo_pair: Pair) -> None:
    model = demo_pair.target.model
    assert isinstance(model, NativeModel)
    assert model.wrap is None
    assert not any(runner is not None and runner.chooses_on_device for runner in demo_pair.runners)


# draft steps


class Margins(Confidence):
    """Reads all signals that logits give."""

    signals = frozenset({"entropy", "prob", "top_prob", "margin"})
    seen: ClassVar[list[float]] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.extend(token[name] for name in sorted(self.signals))
        return super().keep_drafting(token)


POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: Fixed(5),
    "long": lambda: Fixed(37),
    "svip": lambda: SVIP(0.785, 0.15, 40),
    "margins": lambda: Margins(0.05, 12),
    "random": lambda: BetaTS(5.0, 1.0, 12, 3),
}


def _setup(runner: ModelRunner, sampling: SamplingParams, vocab_size: int = 96, eos: Sequence[int] = ()) -> DraftSetup:
    return DraftSetup(runner, sampling, frozenset(eos), vocab_size, seed=4)


def _assert_same_draft(found: Draft, expected: Draft, tolerance: float) -> None:
    assert (list(found.tokens), found.stop_reason) == (list(expected.tokens), expected.stop_reason)
    assert found.entropies == pytest.approx(expected.entropies, abs=tolerance)
    assert found.top_probs == pytest.approx(expected.top_probs, abs=tolerance)
    assert (found.probs is None) == (expected.probs is None)
    if found.probs is not None:
        assert found.probs.shape == expected.probs.shape
        assert (found.probs - expected.probs).abs().max() <= tolerance


def _compare_drafters(
    eager: ModelRunner,
    captured: ModelRunner,
    sampling: SamplingParams,
    policy: Callable[[], LengthPolicy],
    *,
    rounds: int,
    prompt: int = 30,
    vocab_size: int = 96,
    eos: Sequence[int] = (),
    kind: Callable[[DraftSetup], Any] = ModelDrafter,
) -> list[Draft]:
    """Drafts with both runners through a run, whose random prefixes of the drafts are accepted. Returns the drafts."""
    drafters = [kind(_setup(runner, sampling, vocab_size, eos)) for runner in (eager, captured)]
    policies, seen = (policy(), policy()), []
    rng, contexts, drafts = random.Random(6), [], []
    contexts = [Context(random_tokens(random.Random(7), prompt)) for _ in drafters]
    for _ in range(rounds):
        results = []
        for drafter, policy_, context in zip(drafters, policies, contexts, strict=True):
            Margins.seen.clear()
            results.append(drafter.propose(context, policy_, 30))
            seen.append(list(Margins.seen))
        _assert_same_draft(results[1], results[0], 1e-5)
        assert seen[-1] == pytest.approx(seen[-2], abs=1e-5)
        accepted = rng.choice([0, len(results[0].tokens), rng.randint(0, len(results[0].tokens))])
        new = [*results[0].tokens[:accepted], *random_tokens(rng, 1)]
        for context in contexts:
            context.extend(new)
        drafts.append(results[0])
    return drafts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_give_the_drafters_tokens_and_signals(sampling: SamplingParams) -> None:
    """Over rejections, ends of sequence, a bucket's end (512 entries), rows that are used again and a cache that grows."""
    eager, captured = _pair("gemma3_text", "cpu", torch.float32)
    assert captured.chooses_on_device
    captured.reserve(600)
    reasons, buckets, buffers = set(), set(), set()
    for index, (name, policy) in enumerate(POLICIES.items()):
        eos = () if name == "long" else range(4 + index, 96, 9)
        prompt = 590 if name == "long" else 495
        drafts = _compare_drafters(eager, captured, sampling, policy, rounds=4, prompt=prompt, eos=eos)
        reasons |= {(draft.stop_reason or "")[:3] for draft in drafts}
        buckets |= {bucket for _, bucket, _ in captured._forward._self_feeding}
        buffers.add(captured.cache.data.data_ptr())
    assert reasons > {"eos", "len", "ban", "√cH"}
    assert len(buffers) == 2
    assert len(buckets) > 1


@pytest.mark.parametrize(("vocab_size", "family"), [(60, "llama"), (130, "phi3")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_for_a_target_with_another_vocabulary(vocab_size: int, family: str, sampling: SamplingParams) -> None:
    eager, captured = _pair(family, "cpu", torch.float32)
    drafts = _compare_drafters(eager, captured, sampling, POLICIES["fixed"], rounds=5, vocab_size=vocab_size)
    assert all(token < vocab_size for draft in drafts for token in draft.tokens)
    assert {is_long for *_, is_long in captured._forward._self_feeding} == {family == "phi3"}


def test_draft_steps_of_bild_and_of_a_target_without_some_layers() -> None:
    eager, captured = _pair("llama", "cpu", torch.float32)
    drafts = _compare_drafters(eager, captured, GREEDY, POLICIES["fixed"], rounds=8, kind=lambda setup: BildDrafter(setup, 0.065))
    assert any((draft.stop_reason or "").startswith("unsure") and draft.tokens for draft in drafts)
    skips, runners = SkippedLayers(frozenset({1}), frozenset({3})), []
    for is_captured in (False, True):
        model = random_model("llama")
        if is_captured:
            use_static_passes(model, new_graphs=_graphs("cpu"))
        target = ModelRunner(model)
        runners.append(LayerSkippingRunner(target, model, skips))
    assert runners[1].chooses_on_device
    _compare_drafters(runners[0], runners[1], GREEDY, POLICIES["svip"], rounds=6)


@pytest.mark.parametrize(("policy", "reads"), [("fixed", 1), ("long", 2), ("svip", 6)])
def test_the_host_reads_once_a_draft_or_where_the_policy_decides_once_a_token(
    policy: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StaticPass._write
    _, captured = _pair("llama", "cpu", torch.float32)
    drafter = ModelDrafter(_setup(captured, SAMPLED, eos=()))
    context = Context(random_tokens(random.Random(7), 30))
    make: Callable[[], LengthPolicy] = POLICIES[policy] if policy != "svip" else lambda: SVIP(10.0, 0.15, 6)
    drafter.propose(context, make(), 30)  # captures
    context.extend([3])
    loads: list[object] = []
    monkeypatch.setattr(StaticPass, "_write", lambda self, numbers: loads.append(write(self, numbers)))
    with HostReads() as host:
        draft = drafter.propose(context, make(), 30)
    assert len(draft.tokens) == {"fixed": 5, "long": 30, "svip": 6}[policy]
    assert host.count == reads
    assert len(loads) == 2  # the pass over the context's last token, and the first step: the others get nothing from the host


def test_each_token_is_shown_as_soon_as_it_is_drafted_and_a_draft_can_be_ended() -> None:
    _, captured = _pair("llama", "cpu", torch.float32)
    drafter, context = ModelDrafter(_setup(captured, GREEDY)), Context(random_tokens(random.Random(7), 30))
    whole = drafter.propose(context, Fixed(5), 30)
    shown: list[int] = []
    draft = drafter.propose(context, Fixed(5), 30, whole.tokens[:1], lambda _, token: shown.append(token) or len(shown) < 3)
    assert draft.stop_reason == "pass ended"
    assert shown == draft.tokens == whole.tokens[1:4]


def test_what_the_host_has_to_decide_is_not_run_on_the_device() -> None:
    _, captured = _pair("llama", "cpu", torch.float32)
    policy = Fixed(3)
    assert ModelDrafter(_setup(captured, GREEDY))._device_chain(Context([3]), [], policy, is_shown=False) is not None
    recording = DraftSetup(captured, GREEDY, vocab_size=96, keep_logits=True)
    assert ModelDrafter(recording)._device_chain(Context([3]), [], policy, is_shown=False) is None
    model = random_model("llama")
    use_static_passes(model, new_graphs=_graphs("cpu"))
    penalised = ModelRunner(model, penalties=lambda logits, *_: logits)  # type: ignore[arg-type]
    assert not penalised.chooses_on_device
    exits = ModelRunner(model, forward=model.layers_forward([], lambda _: torch.zeros(1, 64)))
    assert not exits.chooses_on_device


def test_accepted_tokens_of_a_draft_are_not_run_again() -> None:
    _, captured = _pair("llama", "cpu", torch.float32)
    drafter, context = ModelDrafter(_setup(captured, GREEDY, eos=())), Context(random_tokens(random.Random(7), 30))
    draft = drafter.propose(context, Fixed(5), 30)
    context.extend([*draft.tokens, 9])
    captured._cached.switch_to(context)
    assert captured._cached.committed == 34  # the last drafted token has not been run


def test_a_nan_in_the_drafts_logits_is_an_error_and_no_token() -> None:
    model = random_model("llama")
    use_static_passes(model, new_graphs=_graphs("cpu"))
    context = Context(random_tokens(random.Random(7), 30))
    for sampling in (GREEDY, SAMPLED):
        drafter = ModelDrafter(_setup(ModelRunner(model), sampling))
        drafter.propose(context, Fixed(5), 30)
        norm = model.parts.norm.clone()
        model.parts.norm.fill_(float("nan"))
        context.extend([3])
        with pytest.raises(RunError, match="NaN"):
            drafter.propose(context, Fixed(5), 30)
        model.parts.norm.copy_(norm)


def test_rules_beyond_the_limit_drop_the_graphs() -> None:
    eager, captured = _pair("llama", "cpu", torch.float32)
    for temperature in range(1, 11):
        sampling = SamplingParams(temperature=temperature / 5)
        _compare_drafters(eager, captured, sampling, POLICIES["fixed"], rounds=1)
    assert 1 <= len(captured._forward._choices) <= 8


_SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("svip", "selfsd", "specinfer", "spectr", "bild", "mtad")]


@pytest.mark.parametrize("method", ["sd", "eesd", "pearl", *_SLOW])
def test_runs_on_captured_passes_give_plain_decodings_text(method: str, demo_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def load(*args: Any, **options: Any) -> NativeModel:
        model = load_native(*args, **options)
        use_static_passes(model, new_graphs=_graphs("cpu", counts))
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_steps_on_a_gpu_give_the_tokens_of_uncaptured_ones(sampling: SamplingParams, dtype: torch.dtype) -> None:
    """In float32 also those of eager passes, whose tokens the host chooses."""
    model = random_model("llama", dtype, "cuda:0")
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=_Uncaptured)
    uncaptured = ModelRunner(model)
    use_static_passes(model, new_graphs=_graphs("cuda:0"))
    captured = ModelRunner(model)
    assert captured.chooses_on_device
    with sdpa_kernel(cuda_graphs._ATTENTION):  # as captures choose it
        for policy in POLICIES.values():
            _compare_drafters(uncaptured, captured, sampling, policy, rounds=6, prompt=495, eos=range(4, 96, 9))
            if dtype == torch.float32:
                _compare_drafters(eager, captured, sampling, policy, rounds=6, prompt=495, eos=range(4, 96, 9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_neither_a_pass_nor_a_deferred_draft_waits_for_the_gpu(sampling: SamplingParams) -> None:
    _, captured = _pair("llama", "cuda:0", torch.bfloat16)
    drafter, context = ModelDrafter(_setup(captured, sampling)), Context(random_tokens(random.Random(7), 30))
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_capture_that_fails_on_a_gpu_leaves_it_usable(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama", torch.float32, "cuda:0")
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=_graphs("cuda:0"))
    captured, run = ModelRunner(model), StaticPass.run

    def waits(self: StaticPass) -> None:
        run(self)
        self.logits.sum().item()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StaticPass, "run", waits)
        for context, tokens, parents, start in random_calls(random.Random(5), 30, 6):
            found = captured.logits(context, tokens, parents, start=start).logits
            _assert_close(found, eager.logits(context, tokens, parents, start=start).logits, 1e-4)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_loaded_model_uses_cuda_graphs_and_gives_the_tokens_of_the_cpu(
    demo_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = specgen.load(device="cuda", dtype="float32")
    ids = pair.tokenizer.encode("User: What is the capital of Japan?\nAssistant:")
    expected = demo_pair.generate(ids, "ar", SamplingParams(max_new_tokens=40)).token_ids
    for method in ("ar", "sd", "svip", "eesd", "selfsd", "specinfer", "pearl"):
        settings: dict[str, Any] = {"selfsd": {"skip": "1"}, "pearl": {"window": 3}}.get(method, {})
        assert pair.generate(ids, method, SamplingParams(max_new_tokens=40), **settings).token_ids == expected
    assert "captured draft steps over 512 cache entries" in caplog.text


# CUDA graphs themselves, on the CPU with a substitute for torch's functions


class _Device:
    """A substitute for torch.cuda: notes streams and captures in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.events: list[str] = []
        self.streams, self.made = ["main"], 0
        device = self

        class Stream:
            def __init__(self, name: Any = "side") -> None:
                self.name = name if isinstance(name, str) else "side"
                device.made += self.name == "side"

            def wait_stream(self, other: Stream) -> None:
                device.events.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                device.events.append("replay")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            depth = len(device.streams)
            device.streams.append(chosen.name)
            try:
                yield
            finally:
                del device.streams[depth:]

        class capture:  # noqa: N801  as torch names it
            def __init__(self, graph: Graph, *, pool: object, stream: Stream, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                self._stream = stream

            def __enter__(self) -> None:
                device.events.append("capture begins")
                device.streams.append(self._stream.name)

            def __exit__(self, *_: object) -> None:
                if fails:
                    raise RuntimeError("invalid capture")  # leaves its stream as the current one, as torch does
                device.streams.pop()
                device.events.append("capture ends")

        @contextmanager
        def same(_: object) -> Iterator[None]:
            yield

        substitutes: dict[str, Any] = {
            "Stream": Stream,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": Graph,
            "device": same,
            "stream": stream,
            "graph": capture,
            "current_stream": lambda _: Stream(device.streams[-1]),
        }
        for name, value in substitutes.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_cuda_graph_is_captured_after_runs_on_its_stream_that_leave_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    count, graphs = torch.zeros(1), CudaGraphs(torch.device("cuda:0"), torch.cuda.Stream())

    def work() -> None:
        assert cuda_graphs._CAPTURE_LOCK.locked()
        device.events.append(f"work on {device.streams[-1]} at {count.item():g}")
        count.add_(1)

    graphs.capture(work, [count])()
    assert device.events == [
        "side waits for main",
        "work on side at 0",
        "work on side at 0",
        "capture begins",
        "work on side at 0",
        "capture ends",
        "main waits for side",
        "replay",
    ]
    assert count.item() == 0


def test_a_model_on_a_gpu_captures_on_one_stream_and_an_exact_one_at_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    for is_exact, widths in ((False, {1, 4}), (True, {16})):
        model = random_model("llama")
        model.exact, device.made = is_exact, 0
        use_cuda_graphs(model)
        runner: Any = ModelRunner(model)
        context = Context(random_tokens(random.Random(1), 20))
        for tokens in ([], [], [3, 4, 5]):
            runner.logits(context, tokens)
        assert {width for width, _, _ in runner._forward._passes} == widths
        runner.cache.enlarge(1000)
        runner.logits(context)
        assert device.made == 1
        assert device.events.count("capture ends") == len(widths) + 1  # and after the cache has grown
        device.events.clear()


def test_a_cuda_graph_that_cannot_be_captured_leaves_stream_lock_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch, fails=True)
    count = torch.zeros(1)
    with pytest.raises(RuntimeError, match="invalid capture"):
        CudaGraphs(torch.device("cuda:0"), torch.cuda.Stream()).capture(lambda: [count.add_(1), None][1], [count])
    assert count.item() == 0
    assert device.streams == ["main"]
    assert not cuda_graphs._CAPTURE_LOCK.locked()


def test_the_same_passes_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    begin = StaticPass.__init__

    def counted(self: StaticPass, forward: Any, cache: Any, width: int, bucket: int, **options: Any) -> None:
        made.append((width, bucket))
        begin(self, forward, cache, width, bucket, **options)

    monkeypatch.setattr(StaticPass, "__init__", counted)
    _, captured = _pair("llama", "cpu", torch.float32)
    captured.reserve(2000)
    for context, tokens, parents, start in random_calls(random.Random(8), 30, 12):
        captured.logits(context, tokens, parents, start=start)
    assert len(made) == len(set(made))
