"""PEARL with the target on a GPU: one thread queues its passes and drafts meanwhile. Streams are recorded here, not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_devices import fake, fake_devices
from recorded_streams import RecordedStreams
from scripted_models import TableRunner, ids_of, scripted_run
from static_checks import random_model

from specgen.base.types import Context, Draft, SamplingParams
from specgen.cli.output_writers import _window
from specgen.compare import machine_description
from specgen.decoding import verifiers
from specgen.decoding.components import Components
from specgen.decoding.costs.pearl_window import ParallelCosts
from specgen.decoding.length_policy import Always
from specgen.decoding.logits_ops import TIES
from specgen.decoding.parallel_timing import time_parallel_passes
from specgen.engine.forward_pass import ModelOutput
from specgen.pair import preparation
from specgen.workers import draft_streams
from specgen.workers.draft_streams import HostDraft, streams_for
from specgen.workers.shared_drafts import SharedDrafts
from specgen.workers.stream_worker import StreamWorker
from specgen.workers.thread_worker import ThreadWorker

GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)


class NotedRunner(TableRunner):
    """A model runner that notes its passes among the events of the streams."""

    def __init__(self, seed: int, streams: RecordedStreams, name: str) -> None:
        super().__init__(seed)
        self.streams, self.name = streams, name

    def logits(self, *args: Any, **named: Any) -> ModelOutput:
        assert self.streams.is_drafting == (self.name == "draft"), "each model has a stream"
        self.streams.events.append(self.name)
        return super().logits(*args, **named)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_targets_pass_is_queued_before_the_draft_is_made(sampling: SamplingParams) -> None:
    streams = RecordedStreams()
    target, draft = NotedRunner(1, streams, "target"), NotedRunner(2, streams, "draft")
    run = scripted_run("pearl", {"window": 3}, target, draft, sampling, worker=StreamWorker(draft, streams))  # type: ignore[arg-type]
    rounds = run.rounds()
    next(rounds)
    assert streams.events == ["draft waits", "draft", "target"], (
        "both prompts are queued, after what the buffers' earlier runs did"
    )
    streams.events.clear()
    drafted = 0
    for round_ in rounds:
        passes = [event for event in streams.events if event in ("target", "draft")]
        assert passes[0] == "target"
        assert passes.count("target") == 1
        handing = [event for event in streams.events if event not in passes]
        if run.finish_reason is None and passes.count("draft"):
            assert handing == ([] if sampling.greedy else ["hand over"])
        drafted += len(round_.draft.tokens)
        streams.events.clear()
    assert drafted
    assert streams.events == ["current waits"], "later runs may use the draft model on the target's stream"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_those_of_a_thread(sampling: SamplingParams, seed: int) -> None:
    found = []
    for make in (lambda runner: StreamWorker(runner, RecordedStreams()), ThreadWorker):  # type: ignore[arg-type]
        draft = TableRunner(2)
        worker = make(draft)
        run = scripted_run("pearl", {"window": 3}, TableRunner(1), draft, sampling, worker=worker, seed=seed)
        rounds = list(run.rounds())
        found.append([(round_.draft.tokens, round_.verdict.path, round_.token_ids) for round_ in rounds])
        if sampling.greedy:
            plain = scripted_run("ar", {}, TableRunner(1), None, sampling)
            assert ids_of(rounds) == ids_of(plain.rounds())
        worker.close()
    assert found[0] == found[1]


def test_a_run_that_ends_early_leaves_no_draft() -> None:
    streams = RecordedStreams()
    draft = TableRunner(2)
    worker = StreamWorker(draft, streams)
    run = scripted_run("pearl", {"window": 3}, TableRunner(1), draft, GREEDY, worker=worker)  # type: ignore[arg-type]
    rounds = run.rounds()
    next(rounds)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert streams.events[-1] == "current waits"


def test_a_draft_on_the_cpu_reads_the_prompt_during_the_targets_pass() -> None:
    streams = RecordedStreams(is_queued=False)
    target, draft = NotedRunner(1, streams, "target"), NotedRunner(2, streams, "draft")
    run = scripted_run("pearl", {"window": 3}, target, draft, GREEDY, worker=StreamWorker(draft, streams))  # type: ignore[arg-type]
    rounds = run.rounds()
    next(rounds)
    assert streams.events == ["draft waits", "target", "draft"]


# ------------------------------------------------------------------ two devices


class WideRunner(TableRunner):
    """A model runner on a device whose logits are a function of the last token."""

    vocab_size = num_embeddings = 300

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device, self.table = device, (torch.randn(300, 300, generator=generator) * 3).to(device)

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-1]]


class Crossing(HostDraft):
    """Copies drafts to another device. Notes the numbers in each of them."""

    def __init__(self, target: torch.device, *, crosses: bool) -> None:
        super().__init__(target)
        self._to, self.crosses = target, crosses
        self.numbers: list[int] = []

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        self.numbers.append(tensor.numel())
        return tensor.to(self._to)


@pytest.mark.parametrize(("top_k", "packed"), [(0, False), (2, True), (200, False)])
def test_a_draft_on_another_device_gives_the_tokens_of_one_on_the_same(top_k: int, packed: bool) -> None:
    """No operator has tensors of both devices, but for copies. With top-k only what it left is copied."""
    sampling = SamplingParams(max_new_tokens=10, temperature=0.7, top_k=top_k, seed=3)
    found = []
    with fake_devices() as copies:
        for place in (0, 1):
            copies.clear()
            target, draft = WideRunner(1, fake(0)), WideRunner(1, fake(place))
            streams = Crossing(fake(0), crosses=place == 1)
            worker: Any = StreamWorker(draft, streams)  # type: ignore[arg-type]
            run = scripted_run("pearl", {"window": 3}, target, draft, sampling, worker=worker, prompt=[5, 7])
            rounds = list(run.rounds())
            found.append([(round_.draft.tokens, round_.verdict.path, round_.token_ids) for round_ in rounds])
            if place:
                between = {names: count for names, count in copies.items() if "cpu" not in names}
                assert between == {(str(fake(1)), str(fake(0))): len(streams.numbers)}
                assert set(streams.numbers) == {3 * (2 * (2 + TIES) if packed else 300), *streams.numbers[-1:]}
    assert found[0] == found[1]
    assert any(path for _, path, _ in found[0])


@pytest.mark.parametrize(("top_k", "packed"), [(0, False), (2, True)])
def test_without_streams_a_draft_crosses_packed_too(top_k: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_new_tokens=10, temperature=0.7, top_k=top_k, seed=3)
    crossed: set[tuple[int, ...]] = set()
    monkeypatch.setattr(
        verifiers, "move", lambda tensor, device: crossed.add(tuple(tensor.shape[1:])) or tensor.to(device, non_blocking=True)
    )
    found = []
    with fake_devices():
        for place in (0, 1):
            crossed.clear()
            run = scripted_run("sd", {"k": 3}, WideRunner(1, fake(0)), WideRunner(1, fake(place)), sampling, prompt=[5, 7])
            found.append(ids_of(run.rounds()))
        assert crossed == {(2 * (2 + TIES),) if packed else (300,)}
    assert found[0] == found[1]


class FakeStream:
    """A CUDA stream that notes for what it waits."""

    def __init__(self, device: torch.device, name: str = "new") -> None:
        self.device, self.name = device, name
        self.awaited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.awaited.append(other)


class FakeCuda:
    """The functions of `torch.cuda` that choose streams. `copies` has, for each copy, the current streams of both devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mains = {device: FakeStream(device, "main") for device in (GPU, OTHER_GPU)}
        self.current = dict(self.mains)
        self.recorded: list[FakeStream] = []
        self.copies: list[tuple[FakeStream, FakeStream]] = []
        functions = SimpleNamespace(Stream=FakeStream, stream=self.stream, current_stream=self.current.__getitem__)
        monkeypatch.setattr(draft_streams, "torch", SimpleNamespace(cuda=functions))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current[stream.device]
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeCuda:
        assert non_blocking
        self.copies.append((self.current[OTHER_GPU], self.current[GPU]))
        return self

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded.append(stream)


GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


def test_a_copy_to_another_gpu_does_not_wait_for_the_targets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current streams of both devices wait for each other in a copy: neither is the one that has the target's pass."""
    cuda: Any = FakeCuda(monkeypatch)
    streams: Any = streams_for(OTHER_GPU, GPU)
    assert streams.crosses
    streams.draft_waits()
    assert streams.hand_over(cuda) is cuda
    (source, arrival), main = cuda.copies.pop(), cuda.mains[GPU]
    assert (source.device, arrival.device) == (OTHER_GPU, GPU)
    assert source.awaited == [cuda.mains[OTHER_GPU]], "earlier runs may have used the draft model"
    assert main not in (source, arrival)
    assert main.awaited == [arrival], "the target's device waits for the copy before it verifies"
    assert cuda.recorded == [main]
    streams.current_waits()
    assert cuda.mains[OTHER_GPU].awaited == [source]


def test_on_one_gpu_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = FakeCuda(monkeypatch)
    streams: Any = streams_for(GPU, GPU)
    with streams.drafting():
        own = cuda.current[GPU]
    assert not streams.crosses
    assert streams.hand_over(cuda) is cuda
    assert (cuda.copies, cuda.mains[GPU].awaited, cuda.recorded) == ([], [own], [cuda.mains[GPU]])


def test_a_draft_on_the_cpu_is_uploaded_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: (device, non_blocking))
    streams: Any = streams_for(torch.device("cpu"), GPU)
    assert isinstance(streams, HostDraft)
    assert (streams.hand_over(torch.zeros(5)), pinned) == ((GPU, True), [5])
    with streams.drafting():
        pass


def test_a_comparison_names_both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    model = SimpleNamespace(num_parameters=5, shape=SimpleNamespace(num_layers=1, model_type="llama"))
    loaded = [SimpleNamespace(device=device, dtype_name="bfloat16", name="a", model=model) for device in (GPU, OTHER_GPU)]
    for draft, gpus, device in (
        (loaded[0], "GPU number 0", "cuda:0,"),
        (loaded[1], "GPU number 0, GPU number 1", "cuda:0 (draft: cuda:1),"),
    ):
        pair: Any = SimpleNamespace(target=loaded[0], draft=draft, devices=lambda draft=draft: [GPU, draft.device])
        described = dict(machine_description.describe(pair))
        assert described["GPU"] == gpus
        assert described["Device"].startswith(device)


# ------------------------------------------------------------------ do the models overlap?

PASS, STEP, WIDTH = 0.008, 0.002, 4  # seconds of a target pass and of a drafted token


class Gpu:
    """A GPU on a clock: the target's pass is queued, the host waits for drafts. With `turns` the models take turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, turns: bool) -> None:
        self.now = self.busy_until = 0.0
        self.turns = turns
        self.policy, self.seconds = Always(), 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def logits(self, context: Context, draft: Any = ()) -> ModelOutput:
        self.busy_until = self.now + PASS
        return ModelOutput(torch.zeros(len(draft) + 1, 4))

    def mark(self) -> Callable[[], float]:
        end = self.busy_until

        def ended() -> float:
            self.now = max(self.now, end)
            return end

        return ended

    def prefill(self, context: Context) -> None: ...

    def start(self, *given: Any) -> None:
        if given:
            self.limit = given[2]

    def finish(self) -> Draft:
        begin = max(self.now, self.busy_until) if self.turns else self.now
        before, self.now = self.now, begin + self.limit * STEP
        self.seconds = self.now - before
        return Draft.chain([0] * self.limit)

    def close(self) -> None: ...


@pytest.mark.parametrize("turns", [False, True])
def test_the_overlap_of_both_models_is_measured(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = Gpu(monkeypatch, turns=turns)
    costs = time_parallel_passes(gpu, gpu, Context([1] * 8), gpu, 16, True)
    assert costs.overlap == pytest.approx(0.0 if turns else 1.0)
    assert costs.take_turns == turns
    assert (costs.draft_alone, costs.target_alone) == pytest.approx((STEP, PASS))
    assert costs.added_by_token == pytest.approx(STEP if turns else 0.0)
    assert costs.gain is not None
    assert (costs.gain < 1) == turns
    assert costs.target_pass == pytest.approx(PASS)
    assert time_parallel_passes(gpu, gpu, Context([1] * 8), gpu, 16).overlap is None
    run: Any = SimpleNamespace(costs=costs, schedule=SimpleNamespace(window=costs.window))
    assert ("the models take turns on this machine, so PEARL is expected to have 0." in _window(run)) == turns
    assert preparation._valid_costs({**vars_of(costs)}) == costs
    for name in ("overlap", "draft_alone", "target_alone"):
        for value in (None, float("nan")):
            assert preparation._valid_costs({**vars_of(costs), name: value}) is None


def vars_of(costs: ParallelCosts) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in costs.__dataclass_fields__}


# ------------------------------------------------------------------ drafts from a GPU's process


@pytest.mark.parametrize("kept", [20, 20 + TIES + 1])
def test_probabilities_cross_as_those_that_top_k_left(kept: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=20)
    shared = SharedDrafts(Components(None, None, sampling, frozenset(), 1000, 0), 4)  # type: ignore[arg-type]
    with (tmp_path / "memory").open("w+b") as file:
        file.truncate(shared.size)
        file.flush()
        shared.map(file.fileno(), 0)
    scores = torch.randn(3, 990, generator=torch.Generator().manual_seed(kept))  # a smaller vocabulary than the target's
    probs = torch.zeros_like(scores).scatter_(1, scores.topk(kept).indices, scores.topk(kept).values.softmax(-1))
    shared._tensor.fill_(0.25)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        shared.write(1, Draft.chain([1, 2, 3], probs=probs))
    is_packed = bool((shared._tensor[0, 1, :3, 500:] == 0.25).all())
    assert is_packed == (kept == 20), "few numbers cross, unless too many tokens are as likely as the last of the top k"
    found = shared.read(1, Draft.chain([1, 2, 3]), torch.device("cpu")).probs
    assert torch.equal(found, torch.nn.functional.pad(probs, (0, 10)))


def _gpus_at_least(count: int) -> list[Any]:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [pytest.mark.gpu, pytest.mark.skipif(found < count, reason=f"fewer than {count} CUDA devices here")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("cuda:0", marks=_gpus_at_least(1)),
        pytest.param("cuda:1", marks=_gpus_at_least(2)),
        pytest.param("cpu", marks=_gpus_at_least(1)),
    ],
)
@pytest.mark.parametrize("top_k", [0, 5])
def test_under_load_two_streams_give_the_tokens_of_one(temperature: float, place: str, top_k: int) -> None:
    from specgen.engine.model_runner import ModelRunner
    from specgen.engine.native.graphs import use_cuda_graphs

    device, draft_device = torch.device("cuda", 0), torch.device(place)
    target, other = (random_model("llama", device=str(on)) for on in (device, draft_device))
    use_cuda_graphs(target)
    if draft_device.type == "cuda":
        use_cuda_graphs(other)
    sampling = SamplingParams(max_new_tokens=200, temperature=temperature, top_k=top_k, seed=5)
    numbers = [torch.randn(2000, 2000, device=on) for on in {device, draft_device}]
    outputs = []
    for busy in (False, True, True):
        draft = ModelRunner(other)
        worker: Any = StreamWorker(draft, streams_for(draft_device, device))
        run = scripted_run("pearl", {"window": 4}, ModelRunner(target), draft, sampling, worker=worker)
        found = []
        for round_ in run.rounds():
            found += round_.token_ids
            if busy:
                _ = [each @ each for each in numbers for _ in range(5)]
        outputs.append(found)
    assert outputs[0] == outputs[1] == outputs[2]
