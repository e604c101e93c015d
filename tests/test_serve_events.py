"""How the events of an answer come from the thread that generates to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from specgen.base.types import SamplingParams
from specgen.serve import queue
from specgen.serve.queue import Asked, Done, Event, Job, Piece, Usage

NEVER = 1000.0  # seconds
DONE = Done(Usage())


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
