"""Captured passes give what eager ones give: on the CPU with recorded operators, on a GPU with CUDA graphs."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from static_checks import random_calls, random_model, random_tokens

import specgen
from specgen.base.types import Context, SamplingParams
from specgen.decoding.policy import Fixed
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import cuda_graphs
from specgen.engine.native.cuda_graphs import CudaGraphs
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.static_forward import WIDTHS, Capturing, use_cuda_graphs, use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.pair.pair import Pair


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "stablelm"])
def test_captured_passes_give_the_eager_logits(family: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rollbacks, trees that grow, a bucket's end (512) and growth of the cache."""
    counts: Counter[str] = Counter()
    eager, captured = runners_of(family, device, dtype, counts=counts)
    buffers, widths = set(), set()
    for context, tokens, parents, start in random_calls(random.Random(family), 478, 16):
        expected = eager.logits(context, tokens, parents, start=start)
        found = captured.logits(context, tokens, parents, start=start)
        assert_close(found.logits, expected.logits, tolerance)
        assert_close(found.hidden_states, expected.hidden_states, tolerance)
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
    _, captured = runners_of("llama", device, dtype)
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
            assert_close(runner.logits(context, tokens, parents, start=start).logits, expected, 1e-5)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not be captured: operation not permitted" in caplog.text
    assert _Broken.tries == 1
    compare_drafters(eager, runners[0], GREEDY, lambda: Fixed(5), rounds=4)
    caplog.clear()


def test_captures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, captured = runners_of("llama", "cpu", torch.float32)
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
    assert not any(runner is not None and runner.chooses_on_device() for runner in demo_pair.runners)


@on_gpu
def test_a_capture_that_fails_on_a_gpu_leaves_it_usable(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama", torch.float32, "cuda:0")
    eager = ModelRunner(model)
    use_static_passes(model, new_graphs=graphs_on("cuda:0"))
    captured, run = ModelRunner(model), StaticPass.run

    def waits(self: StaticPass) -> None:
        run(self)
        self.logits.sum().item()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StaticPass, "run", waits)
        for context, tokens, parents, start in random_calls(random.Random(5), 30, 6):
            found = captured.logits(context, tokens, parents, start=start).logits
            assert_close(found, eager.logits(context, tokens, parents, start=start).logits, 1e-4)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()


@on_gpu
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
    count, ended = torch.zeros(1), list[tuple[object, ...]]()
    for name in ("end", "release"):
        function = {"end": "_cuda_endAllocateToPool", "release": "_cuda_releasePool"}[name]
        monkeypatch.setattr(torch._C, function, lambda *given, name=name: ended.append((name, *given)), raising=False)
    with pytest.raises(RuntimeError, match="invalid capture"):
        CudaGraphs(torch.device("cuda:1"), torch.cuda.Stream()).capture(lambda: [count.add_(1), None][1], [count])
    once = [("end", 1, "pool"), ("release", 1, "pool")]  # torch's allocator would wait for the end of the capture
    assert ended == [*once, *once]  # and of the one after it, which fails too
    assert device.events.count("capture begins") == 2
    assert count.item() == 0
    assert device.streams == ["main"]
    assert not cuda_graphs._CAPTURE_LOCK.locked()


@on_gpu
def test_a_gpu_can_be_used_after_a_failed_capture(caplog: pytest.LogCaptureFixture) -> None:
    """Memory that two streams have used is freed, and other work is captured."""
    device, numbers = torch.device("cuda", 0), torch.zeros(4, device="cuda")

    def waits() -> None:
        numbers.add_(1)
        numbers.sum().item()

    before = torch.cuda.current_stream()
    graphs = CudaGraphs(device, torch.cuda.Stream(device))
    assert Capturing(lambda: graphs).capture(graphs, "work that waits", waits, [numbers]) is waits
    assert "work that waits could not be captured" in caplog.text
    assert "previous error" not in caplog.text
    caplog.clear()
    assert torch.cuda.current_stream() == before
    assert torch.rand(1, device=device).item() < 1  # from torch's own generator
    shared = torch.zeros(1 << 24, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        shared.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    held = torch.cuda.memory_stats()["active_bytes.all.current"]
    del shared
    torch.zeros(1, device=device)  # looks for memory whose streams are done
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < held - (1 << 25)
    replay = CudaGraphs(device, torch.cuda.Stream(device)).capture(lambda: [numbers.add_(1), None][1], [numbers])
    replay()
    assert numbers.tolist() == [1.0] * 4


def test_a_failed_capture_reports_the_first_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = _Device(monkeypatch, fails=True)
    graphs = CudaGraphs(torch.device("cuda:0"), torch.cuda.Stream())

    def work() -> None:
        if "capture begins" in device.events:
            raise RuntimeError("not permitted when stream is capturing\nSearch for it in the documentation")

    replay = Capturing(lambda: graphs).capture(graphs, "passes", work, ())
    assert replay is work
    assert caplog.messages == [
        "no CUDA graphs from here on, so passes take longer: passes could not be captured: not permitted when stream is capturing"
    ]
    caplog.clear()


def test_a_replay_without_memory_leaves_the_pass_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def capture(self, work: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
            def replay() -> None:
                raise torch.OutOfMemoryError("CUDA out of memory\nof many lines")

            return replay

    def work() -> None:
        return None

    assert Capturing(Full).capture(Full(), "passes", work, (), torch.zeros(1, 4)) is work
    assert caplog.messages[0].endswith("passes could not be captured: CUDA out of memory")
    caplog.clear()


def test_the_same_passes_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    begin = StaticPass.__init__

    def counted(self: StaticPass, forward: Any, cache: Any, width: int, bucket: int, **options: Any) -> None:
        made.append((width, bucket))
        begin(self, forward, cache, width, bucket, **options)

    monkeypatch.setattr(StaticPass, "__init__", counted)
    _, captured = runners_of("llama", "cpu", torch.float32)
    captured.reserve(2000)
    for context, tokens, parents, start in random_calls(random.Random(8), 30, 12):
        captured.logits(context, tokens, parents, start=start)
    assert len(made) == len(set(made))
