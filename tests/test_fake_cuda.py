"""The pretended GPUs find what is planted here, and accept what is correct. All methods run on them as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, gpus  # noqa: F401  a fixture
from fake_cuda_tensors import MixedDevicesError
from fake_gpus import CaptureError, Gpus
from race_detector import RaceError

GPU = "cuda:0"


def side_work(*, before: bool, after: bool, read: bool) -> torch.Tensor:
    """Changes or reads a tensor of the current stream on another stream, with the waits `before` and `after` this or without."""
    numbers, side = torch.ones(4, device=GPU), torch.cuda.Stream(GPU)
    if before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = numbers * 2 if read else numbers.mul_(2)
    if after:
        torch.cuda.current_stream().wait_stream(side)
    return (numbers.add_(1) if read else numbers + 1) if result is not None else result


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_missing_wait_is_found(before: bool, after: bool, read: bool, gpus: Gpus) -> None:  # noqa: F811
    if before and after:
        side_work(before=before, after=after, read=read)
        return
    with pytest.raises(RaceError, match=r"nothing orders(.|\n)*side_work|test_fake_cuda.py"):
        side_work(before=before, after=after, read=read)
    torch.cuda.synchronize()
    gpus.errors.clear()


@pytest.mark.parametrize("how", ["nothing", "record_stream", "wait", "synchronize"])
def test_memory_that_is_freed_while_another_stream_uses_it_is_found(how: str, gpus: Gpus) -> None:  # noqa: F811
    numbers, side = torch.ones(4, device=GPU), torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = numbers * 2
    if how == "record_stream":
        numbers.record_stream(side)
    elif how == "wait":
        torch.cuda.current_stream().wait_stream(side)
    elif how == "synchronize":
        side.synchronize()
    del numbers
    if how == "nothing":
        with pytest.raises(RaceError, match="is freed"):
            gpus.check()
    else:
        gpus.check()
    assert kept.shape == (4,)


@pytest.mark.parametrize("wait", [False, True])
def test_a_pinned_buffer_that_is_written_again_is_found(wait: bool, gpus: Gpus) -> None:  # noqa: F811
    buffer, device = torch.empty(4, pin_memory=True), torch.empty(4, device=GPU)
    for step in range(2):
        if step and wait:
            torch.cuda.current_stream().synchronize()
        if step and not wait:
            with pytest.raises(RaceError, match="pinned memory"):
                buffer.fill_(step)
            return
        buffer.fill_(step)
        device.copy_(buffer, non_blocking=True)
    assert device.tolist() == [1.0] * 4
    assert gpus.counts["uploads, pinned, non-blocking"] == 2


@pytest.mark.parametrize("into", ["own", "new"])
@pytest.mark.parametrize("wait", [False, True])
def test_a_download_that_is_read_before_it_is_complete_is_found(wait: bool, into: str, gpus: Gpus) -> None:  # noqa: F811
    numbers = torch.arange(4.0, device=GPU)
    if into == "own":
        target = torch.empty(4, pin_memory=True).copy_(numbers, non_blocking=True)
    else:
        target = numbers.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if wait:
        event.synchronize()
        assert target.tolist() == [0, 1, 2, 3]
    else:
        with pytest.raises(RaceError, match="a download"):
            target.tolist()


def capture(work: Callable[[], Any], warm: bool = True) -> Any:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream())
    if warm:
        with torch.cuda.stream(stream):
            work()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


_REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda numbers: numbers.sum().item(),
    "condition": lambda numbers: bool(numbers[0] > 0),
    "tolist": lambda numbers: numbers.tolist(),
    "mask": lambda numbers: numbers[numbers > 0],
    "nonzero": lambda numbers: numbers.nonzero(),
    "synchronize": lambda numbers: torch.cuda.synchronize(),
    "event": lambda numbers: torch.cuda.current_stream().record_event().synchronize(),
    "upload": lambda numbers: numbers.copy_(torch.ones(4)),
    "new on the device": lambda numbers: numbers + torch.tensor([1.0], device=GPU),
    "pinned memory": lambda numbers: torch.ones(4).pin_memory(),
    "download": lambda numbers: numbers.to("cpu", non_blocking=True),
    "other stream": lambda numbers: _on_another_stream(numbers),
    "random": lambda numbers: numbers.uniform_(generator=torch.Generator(GPU)),
}


def _on_another_stream(numbers: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        numbers.add_(1)


@pytest.mark.parametrize("what", _REFUSED)
def test_what_a_capture_forbids_is_refused(what: str, gpus: Gpus) -> None:  # noqa: F811
    numbers, before = torch.ones(4, device=GPU), torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="capturing"):
        capture(lambda: _REFUSED[what](numbers), warm=False)
    assert torch.cuda.current_stream() is before
    assert gpus.capture is None
    assert numbers.tolist() == [1.0] * 4


def test_captured_work_is_done_in_replays_only(gpus: Gpus) -> None:  # noqa: F811
    numbers, outputs = torch.ones(4, device=GPU), []

    def work() -> None:
        numbers.mul_(2)
        outputs.append(numbers + 1)

    graph = capture(work)
    assert numbers.tolist() == [2.0] * 4, "the warm-up has done it"
    assert outputs[-1].isnan().all(), "nothing is computed in a capture"
    for expected in (4.0, 8.0):
        graph.replay()
        assert (numbers.tolist(), outputs[-1].tolist()) == ([expected] * 4, [expected + 1] * 4)


def test_a_graph_that_uses_freed_memory_is_found(gpus: Gpus) -> None:  # noqa: F811
    held = [torch.ones(4, device=GPU)]
    total = torch.zeros(4, device=GPU)
    graph = capture(lambda: total.add_(held[0]))
    graph.replay()
    held.clear()
    with pytest.raises(RaceError, match="freed"):
        graph.replay()


@pytest.mark.parametrize("wait", [False, True])
def test_graphs_that_share_a_pool_must_not_run_at_once(wait: bool, gpus: Gpus) -> None:  # noqa: F811
    pool, stream, graphs, buffers = torch.cuda.graph_pool_handle(), torch.cuda.Stream(GPU), [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        buffers.append(torch.ones(4, device=GPU))
        with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
            buffers[-1].add_(buffers[-1] * 2)
    graphs[0].replay()
    if wait:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if wait:
            graphs[1].replay()
            torch.cuda.synchronize()
            return
        with pytest.raises(RaceError, match="pool of graphs"):
            graphs[1].replay()


def test_devices_do_not_mix_and_copies_between_them_are_ordered(gpus: Gpus) -> None:  # noqa: F811
    here, there = torch.ones(4, device=GPU), torch.ones(4, device="cuda:1")
    assert (here.is_cuda, here.is_cpu, str(there.device)) == (True, False, "cuda:1")
    for mixed in (lambda: here + there, lambda: here + torch.ones(4), lambda: torch.cat((here, torch.ones(2)))):
        with pytest.raises(MixedDevicesError):
            mixed()
    assert (here + torch.tensor(2.0)).tolist() == [3.0] * 4, "a number of the host is an argument of the kernel"
    assert (here.to("cuda:1") + there).tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")


def test_counts_and_errors_of_a_gpu(gpus: Gpus) -> None:  # noqa: F811
    gpus.counts.clear()
    numbers = torch.ones(4, 4).to(GPU)
    (numbers @ numbers)[1:].relu_()
    chosen = torch.arange(2).pin_memory().to(GPU, non_blocking=True)
    numbers[chosen] = True
    torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert gpus.counts == {
        "uploads, pageable, blocking": 1,
        "uploads, pinned, non-blocking": 1,
        "synchronisations": 2,
        "synchronisations, nothing to wait for": 1,
        "launches": 3,
    }
    gpus.counts.clear()
    for waits in (lambda: numbers[numbers > 0], lambda: numbers[[0, 1]], lambda: numbers.any().item(), lambda: numbers.tolist()):
        numbers.add_(1)
        waits()
    assert gpus.counts["synchronisations"] == 4
    assert torch.empty(3, device=GPU).isnan().all(), "new memory is not zero"
    with pytest.raises(RuntimeError, match="type for generator"):
        torch.rand(2, device=GPU, generator=torch.Generator())
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    numbers.add_(1)
    last.record()
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0


def test_memory_runs_out() -> None:
    with fake_cuda(1, memory=1000):
        kept = torch.zeros(100, device=GPU)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.zeros(200, device=GPU)
        del kept
        torch.zeros(200, device=GPU)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device=GPU)
