"""How the events of an answer come from the thread that generates to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from specgen.base.types import SamplingParams
from specgen.serve import queue
from specgen.serve.errors import ApiError
from specgen.serve.queue import Asked, Done, Event, Job, Piece, Usage, Worker

NEVER = 1000.0  # seconds
DONE = Done(Usage())
NO_PAIR = cast("Any", None)


def run(check: Callable[[Job], Awaitable[None]]) -> None:
    """Runs `check` with a job, for at most 30 seconds."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await check(Job(Asked(["x"], SamplingParams(), "prompt")))

    asyncio.run(limited())


async def emitted(job: Job, *events: Event) -> None:
    """Hands out events in another thread, and waits until they are."""
    await asyncio.to_thread(lambda: [job.emit(event) for event in events])


def pieces(*numbers: int) -> list[Piece]:
    return [Piece(0, str(number)) for number in numbers]


def test_the_first_and_the_last_event_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "PAUSE", NEVER)
    monkeypatch.setattr(queue, "MOST_FOR_FIRST", 0.0)

    async def check(job: Job) -> None:
        batches = job.batches()
        first = asyncio.create_task(anext(batches))
        await emitted(job, *pieces(0))
        assert await first == pieces(0)
        rest = asyncio.create_task(anext(batches))
        await emitted(job, *pieces(1, 2, 3))
        assert not rest.done()
        await emitted(job, *pieces(4), DONE)
        assert await rest == [*pieces(1, 2, 3, 4), DONE]
        assert await anext(batches, None) is None

    run(check)


def test_a_piece_comes_after_the_pause_without_another_one() -> None:
    async def check(job: Job) -> None:
        batches = job.batches()
        first = asyncio.create_task(anext(batches))
        await emitted(job, *pieces(0))
        await first
        second = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)
        await emitted(job, *pieces(1))
        assert await second == pieces(1)
        third = asyncio.create_task(anext(batches))
        await asyncio.sleep(3 * queue.PAUSE)  # now the job waits for any event
        await emitted(job, *pieces(2), DONE)
        assert (await third)[0] == pieces(2)[0]

    run(check)


def test_generating_waits_until_the_first_piece_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_FOR_FIRST", NEVER)

    async def check(job: Job) -> None:
        batches = job.batches()
        first = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)  # the client is known to read pieces
        is_handed = threading.Event()
        thread = threading.Thread(
            target=lambda: (job.emit(pieces(0)[0]), is_handed.set()), daemon=True
        )
        thread.start()
        assert await first == pieces(0)
        assert not is_handed.wait(0.02)
        second = asyncio.create_task(anext(batches))
        assert await asyncio.to_thread(is_handed.wait, 20)
        await emitted(job, *pieces(1), DONE)  # only the first one is waited for
        assert (await second)[0] == pieces(1)[0]
        thread.join()

    run(check)


def test_whole_answers_need_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_FOR_FIRST", NEVER)

    async def check(job: Job) -> None:
        woken = 0

        def counted(call: Callable[[], None]) -> None:
            nonlocal woken
            woken += 1
            loop.call_soon_threadsafe(call)

        loop = job._loop
        job._loop = type("Loop", (), {"call_soon_threadsafe": staticmethod(counted)})()
        events = asyncio.create_task(job.all_events())
        await asyncio.sleep(0)
        await emitted(job, *pieces(0, 1, 2))
        await emitted(job, DONE)
        assert await events == [*pieces(0, 1, 2), DONE]
        assert woken == 1

    run(check)


class Interrupted(Job):
    """A job whose first event is handed out just after the event loop begins to wait for any event.
    Handing it out is interrupted, before the loop is woken, until `goes_on` is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goes_on = threading.Event()
        self._has_tested = threading.Event()
        self.thread = threading.Thread(target=lambda: self.emit(pieces(0)[0]), daemon=True)

    def __setattr__(self, name: str, value: Any) -> None:
        is_emitting = threading.current_thread() is self.__dict__.get("thread")
        if name == "_is_awaited" and is_emitting and not value:
            self._has_tested.set()
            assert self.goes_on.wait(20)
        super().__setattr__(name, value)
        if name == "_is_awaited" and value and self.thread.ident is None:
            self.thread.start()
            assert self._has_tested.wait(20)


def test_an_event_that_wakes_late_hides_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "PAUSE", 0.01)

    async def check(plain: Job) -> None:
        job = Interrupted(plain.asked)
        batches = job.batches()
        assert await anext(batches) == pieces(0)
        second = asyncio.create_task(anext(batches))
        await asyncio.sleep(0.1)  # now the job waits for any event
        job.goes_on.set()
        await asyncio.to_thread(job.thread.join)
        await asyncio.sleep(0.05)
        await emitted(job, *pieces(1))
        assert await asyncio.wait_for(second, 5) == pieces(1)

    run(check)


def test_closing_the_queue_waits_for_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop itself closes it, and only the worker's thread may wait for the loop."""

    async def check(plain: Job) -> None:
        worker = Worker(NO_PAIR, "ar", {}, 4)
        job = worker.submit(plain.asked)
        first = asyncio.create_task(anext(job.batches()))
        await asyncio.sleep(0)  # the client is known to read pieces
        monkeypatch.setattr(job._is_begun, "wait", lambda *_: pytest.fail("it waits"))
        worker.close()
        (event,) = await first
        assert isinstance(event, ApiError)
        assert event.code == "ending"

    run(check)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("joint", SamplingParams(logprobs=1)),
        ("joint", SamplingParams(temperature=1.0)),
        ("suffix", SamplingParams(temperature=1.0, seed=3)),
    ],
)
def test_what_a_method_refuses_is_not_said_to_be_the_temperature(
    method: str, sampling: SamplingParams
) -> None:
    worker = Worker(NO_PAIR, method, {"history": True} if method == "suffix" else {}, 4)
    with pytest.raises(ApiError) as caught:
        worker.submit(Asked(["x"], sampling, "prompt"))
    assert (caught.value.status, caught.value.param) == (400, None)
