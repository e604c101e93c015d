"""The queue of what clients asked for, and the worker that generates it: one answer at a time, in
the order in which they were asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import Round, SamplingParams, TokenLogProbs
from specgen.engine.text.stop_strings import StopStrings
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.pair import records
from specgen.pair.figures import Figures
from specgen.pair.prompts import Prompt, continuation_ids
from specgen.serve.errors import ApiError, of_generation
from specgen.view.generation import AnswerText
from specgen.view.generation import Piece as AnswerPiece

if TYPE_CHECKING:
    from collections.abc import Generator

    from specgen.engine.text.tokenizer import Tokenizer
    from specgen.methods.base import Request
    from specgen.pair.pair import Pair

PAUSE = 0.05  # seconds between pieces of a streamed answer: faster ones are sent together
MOST_FOR_FIRST = 0.01  # seconds that generating waits until the first text is sent
PLAIN = "ar"  # the method without drafts
_SEEDS = 1 << 63
_RECENT = 8  # answers whose mean time says when a place in the queue may be free


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks to generate: `count` answers to each of the prompts, one after the other.

    With a seed in `sampling`, answer i of a prompt has the seed + i. `prompt_field` is the
    request's field with the prompts. `prediction` is what the client expects as answer, which is
    drafted too. `method` is the server's method, which None means too, or `ar`. `rounds`: the
    client also gets each round, as `_round_line` has it.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    prompt_field: str
    count: int = 1
    prediction: str = ""
    method: str | None = None
    rounds: bool = False


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log-probability (nats), and the likeliest tokens at its place
    with theirs. Each token is its text and its bytes. `offset` is where its text begins in the
    answer."""

    token: tuple[str, bytes]
    log_prob: float
    top: Sequence[tuple[tuple[str, bytes], float]]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. `choice` is the answer's number. `tokens` are its tokens with their
    log-probabilities, and `rounds` the rounds that it comes from, if they were asked for."""

    choice: int
    text: str
    tokens: Sequence[ScoredToken] = ()
    rounds: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer: `reason` is OpenAI's `finish_reason`. `summary` are its figures, as in
    a trace, if rounds were asked for."""

    choice: int
    reason: str
    summary: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Usage:
    """The counts of tokens of all answers to a request.

    `cached` are those of the prompts that the KV cache held. `drafted` and `accepted` count drafted
    tokens, whatever drafted them.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, figures: Figures) -> None:
        self.completion += figures.new_tokens
        self.drafted += figures.drafted
        self.accepted += figures.accepted
        self.seconds += figures.seconds


@dataclass(frozen=True, slots=True)
class Done:
    """All answers are complete."""

    usage: Usage


Event = Piece | Ended | Done | ApiError


@dataclass(eq=False)
class Job:
    """A request on its way through the queue. The events of its answers come out of `batches` or
    `all_events`, in the event loop in which it was made. The last one is `Done` or an `ApiError`.

    The event loop is woken for the first event, for the last one, and between them once in
    `PAUSE` seconds, as both threads cannot run Python at the same time.
    """

    asked: Asked
    usage: Usage = field(default_factory=Usage)
    is_cancelled: bool = False
    # why the server itself ended it
    ended_by: ApiError | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = deque[Event]()
        self._arrived = asyncio.Event()
        self._is_awaited = False  # whether the event loop wants to know of any event
        self._is_streamed = False
        self._is_begun = threading.Event()  # the client has been sent the first events

    def emit(self, event: Event) -> None:
        """Hands an event to the event loop, and waits for at most `MOST_FOR_FIRST` while the first
        text is sent. Called by the worker's thread alone."""
        is_woken = self.hand_over(event)
        if is_woken and self._is_streamed and not self._is_begun.is_set():
            # while this thread waits, the first text is sent without waiting for it
            self._is_begun.wait(MOST_FOR_FIRST)
            self._is_begun.set()

    def hand_over(self, event: Event) -> bool:
        """Hands an event to the event loop, and waits for nothing. Returns whether it wakes the
        loop."""
        self._events.append(event)
        if not self._is_awaited and not _is_last(event):
            return False
        self._is_awaited = False
        with suppress(RuntimeError):  # the loop has ended, and with it the client's connection
            self._loop.call_soon_threadsafe(self._arrived.set)
        return True

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yields the events, all that have come at a time."""
        self._is_streamed = True
        while True:
            await self._any_event()
            batch = self._taken()
            yield batch
            self._is_begun.set()
            if _is_last(batch[-1]):
                return
            await self._last_event(PAUSE)

    async def all_events(self) -> list[Event]:
        """Returns all events, once the last one has come."""
        await self._last_event()
        return self._taken()

    async def _any_event(self) -> None:
        self._is_awaited = True
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
            # this may be for an earlier event, which has been taken already
            self._is_awaited = True
        self._is_awaited = False

    async def _last_event(self, seconds: float | None = None) -> None:
        """Waits for the last event, at most `seconds` (None: without limit)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._events and _is_last(self._events[-1])):
                    self._arrived.clear()
                    await self._arrived.wait()

    def _taken(self) -> list[Event]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events


def _is_last(event: Event) -> bool:
    return isinstance(event, Done | ApiError)


class Worker:
    """Generates the answers to the jobs in the queue. `run` does it, in the thread that calls it,
    until `stop` is called.

    Without another method in the request, `method` decodes, with `settings`. At most `most_waiting`
    jobs wait. `log` is called with a line about each job, which has counts and times alone.
    """

    def __init__(
        self,
        pair: Pair,
        method: str,
        settings: Mapping[str, Any],
        most_waiting: int,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.pair = pair
        self.method = method
        self._settings = settings
        self._choice = methods.choice_of(method, settings)
        self._most_waiting = most_waiting
        self._log = log
        self._waiting = deque[Job]()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_stopped = False
        self._recent = deque[float](maxlen=_RECENT)  # seconds

    # called by the event loop

    def submit(self, asked: Asked) -> Job:
        """Puts a job at the end of the queue.

        Raises ApiError: 503 if the queue is full, or if the server is ending, 400 if its method
        cannot decode with the sampling parameters.
        """
        self._check_method(asked)
        with self._changed:
            if self._is_closing:
                raise _ending()
            if len(self._waiting) >= self._most_waiting + (self._running is None):
                raise ApiError(
                    503,
                    f"{len(self._waiting)} requests are waiting; no more are taken",
                    code="queue_full",
                    kind="server_error",
                    retry_after=self._seconds_until_free(),
                )
            job = Job(asked)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def _check_method(self, asked: Asked) -> None:
        """Raises ApiError for a method that is neither the server's nor plain decoding: what others
        need is not loaded, and measuring it would keep all clients waiting."""
        if asked.method == PLAIN:
            return
        if asked.method not in (None, self.method):
            problem = f"this server decodes with {self.method}, and with {PLAIN} where asked to"
            raise ApiError(400, problem, param="specgen.method")
        try:
            self._choice.method.check_request(self._choice.settings, asked.sampling)
        except SpecgenError as error:
            raise ApiError(400, str(error)) from error

    def cancel(self, job: Job) -> None:
        """Ends a job whose client has gone: at once if it waits, within one round if it runs."""
        job.is_cancelled = True
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Refuses further jobs, and ends those in the queue, but not the one that runs."""
        with self._changed:
            self._is_closing = True
            for job in self._waiting:
                job.hand_over(_ending())
            self._waiting.clear()

    def end_running(self) -> None:
        """Ends the job that runs, within one round."""
        running = self._running
        if running is not None:
            running.ended_by = _ending()

    def stop(self) -> None:
        """Lets `run` return, once no job runs."""
        self.close()
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _seconds_until_free(self) -> int:
        mean = sum(self._recent) / len(self._recent) if self._recent else 1.0
        return max(1, round(mean))

    # called by the worker's own thread

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_stopped:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = job
            start = time.perf_counter()
            try:
                self._generate(job)
            except Exception as error:  # noqa: BLE001  the client is told, and the server goes on
                failure = of_generation(error, job.asked.prompt_field)
                self._log(f"{failure.status} {type(error).__name__}")
                job.emit(failure)
            finally:
                self._running = None
                self._recent.append(time.perf_counter() - start)

    def _generate(self, job: Job) -> None:
        """Generates all answers of a job, and hands out their events."""
        asked = job.asked
        for number, prompt in enumerate(asked.prompts):
            for turn in range(asked.count):
                sampling = asked.sampling
                if sampling.seed is not None:
                    sampling = replace(sampling, seed=(sampling.seed + turn) % _SEEDS)
                request = self._request(prompt, sampling, asked)
                if turn == 0:
                    job.usage.prompt += len(request.prompt_ids)
                self._answer(job, request, number * asked.count + turn)
                if job.is_cancelled:
                    self._log(f"client gone after {_in_words(job.usage)}")
                    return
                if job.ended_by is not None:
                    raise job.ended_by
        self._log(f"200 {_in_words(job.usage)}")
        job.emit(Done(job.usage))

    def _request(self, prompt: Prompt, sampling: SamplingParams, asked: Asked) -> Request:
        if asked.method == PLAIN:
            request = self.pair.request(prompt, PLAIN, sampling)
        else:
            request = self.pair.request(prompt, self.method, sampling, **self._settings)
        if not asked.prediction:
            return request
        expected = continuation_ids(asked.prediction, self.pair.tokenizer)
        return replace(request, prediction=expected)

    def _answer(self, job: Job, request: Request, choice: int) -> None:
        """Generates one answer. Ends early if the job is cancelled or ended."""
        asked = job.asked
        tokenizer = self.pair.tokenizer
        run = self.pair.run(request)
        missing = run.uncached_tokens
        job.usage.cached += len(request.prompt_ids) - (1 if missing is None else missing)
        figures = Figures(request.method.name, prompt_tokens=missing)
        stop = StopStrings.of(request.sampling.stop, tokenizer)
        answer = AnswerText(tokenizer.detokenizer(request.prompt_ids), stop)

        scores = _Scores(answer, tokenizer)

        rounds = cast("Generator[Round]", run.rounds())
        with closing(rounds):
            for round_ in _until(rounds, lambda: job.is_cancelled or job.ended_by is not None):
                figures.add(round_)
                shown = answer.add(round_)
                text = "".join(piece.text for piece in shown)
                lines: Sequence[Mapping[str, Any]] = ()
                if asked.rounds:
                    lines = [_round_line(round_, shown, tokenizer)]
                job.emit(Piece(choice, text, scores.after(round_), lines))

        job.usage.add(figures)
        if run.finish_reason is None:
            return
        rest = "".join(piece.text for piece in answer.finish())
        if rest:
            job.emit(Piece(choice, rest, scores.shown()))
        reason = "length" if run.finish_reason == "length" else "stop"
        summary = figures.as_dict(answer.text, run.finish_reason) if asked.rounds else None
        job.emit(Ended(choice, reason, summary))


class _Scores:
    """The tokens of an answer with their log-probabilities, each as soon as its text is shown.
    Tokens without text that ends the answer, and those of a stop string, have none."""

    def __init__(self, answer: AnswerText, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._entries: list[tuple[int, TokenLogProbs]] = []
        self._given = 0
        self._pieces: Sequence[bytes | None] | None = None

    def after(self, round_: Round) -> Sequence[ScoredToken]:
        """Adds a round's tokens, and returns those that are shown now."""
        if not round_.verdict.log_probs:
            return ()
        self._entries += zip(round_.token_ids, round_.verdict.log_probs, strict=True)
        return self.shown()

    def shown(self) -> Sequence[ScoredToken]:
        """Returns the tokens that are shown now and were not before."""
        first = self._given
        self._given = min(self._answer.shown_tokens, len(self._entries))
        return [self._scored(number) for number in range(first, self._given)]

    def _scored(self, number: int) -> ScoredToken:
        token, entry = self._entries[number]
        top = zip(entry.top, entry.top_log_probs, strict=True)
        return ScoredToken(
            self._written(token),
            entry.log_prob,
            [(self._written(other), log_prob) for other, log_prob in top],
            self._answer.offset(number),
        )

    def _written(self, token: int) -> tuple[str, bytes]:
        """Returns a token's text and its bytes, which are those of the text where the tokenizer's
        tokens do not stand for bytes."""
        if self._pieces is None:
            self._pieces = ()
            with suppress(NoTokenBytes):
                self._pieces = token_bytes(self._tokenizer).pieces
        text = self._tokenizer.text_of([token])
        own = self._pieces[token] if token < len(self._pieces) else None
        return text, text.encode() if own is None else own


def _round_line(
    round_: Round, shown: Sequence[AnswerPiece], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns a round as a trace has it, and what a page needs to show it: `statuses` of the
    drafted tokens, and `shown`, the answer's text that the round has completed, in pieces of which
    `drafted` says whether their tokens were."""
    return records.round_line(round_, tokenizer.text_of) | {
        "statuses": [status.value for status in round_.statuses],
        "shown": [{"text": piece.text, "drafted": piece.drafted} for piece in shown],
    }


def _until(rounds: Iterator[Round], is_over: Callable[[], bool]) -> Iterator[Round]:
    while not is_over():
        round_ = next(rounds, None)
        if round_ is None:
            return
        yield round_


def _ending() -> ApiError:
    return ApiError(503, "the server is ending", code="ending", kind="server_error", retry_after=5)


def _in_words(usage: Usage) -> str:
    speed = usage.completion / usage.seconds if usage.seconds else 0.0
    return (
        f"{usage.prompt:,} prompt tokens ({usage.cached:,} cached), {usage.completion:,} new in "
        f"{usage.seconds:.2f} s ({speed:,.0f} tokens/s), {usage.accepted:,} of {usage.drafted:,} "
        "drafted accepted"
    )
