"""The server's addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from specgen import methods
from specgen.base.machine import __version__
from specgen.base.text import json_line
from specgen.base.types import SamplingParams
from specgen.serve.access import LARGEST_BODY, Access, App, Guard, Receive, Scope, Send, too_large
from specgen.serve.answers import Answers, ChatAnswers, CompletionAnswers
from specgen.serve.chat_page import chat_page
from specgen.serve.description import page
from specgen.serve.errors import ApiError
from specgen.serve.queue import Asked, Done, Event, Job, Worker
from specgen.serve.requests import ChatRequest, Common, CompletionRequest, parsed

BODY_SECONDS = 60.0  # for a request's body to arrive
_NOT_HERE = {
    "/v1/responses": "take /v1/chat/completions",
    "/v1/embeddings": "this model generates text only",
}
T = TypeVar("T")


def make_app(
    worker: Worker,
    default: SamplingParams,
    access: Access,
    log: Callable[[str], None] = lambda _: None,
) -> App:
    """Returns the server as an ASGI application. `default` has the sampling parameters that
    requests leave out, `log` is called with a line about each request that is refused."""
    app = FastAPI(
        title="specgen", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    service = _Service(worker, default)
    # routes without FastAPI's own reading of bodies: `parsed` does it
    app.add_route("/", service.chat_page)
    app.add_route("/health", service.health)
    app.add_route("/docs", service.docs)
    app.add_route("/v1/models", service.models)
    app.add_route("/v1/models/{name:path}", service.model)
    app.add_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_route("/v1/completions", service.complete, methods=["POST"])

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        log(f"{error.status} {error.code or error.kind}")
        return _json(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        return await refused(request, _without_address(error, request.url.path))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    return Guard(app, access, log)


class _Service:
    """Answers requests, one function for each address. `default` is as in `make_app`."""

    def __init__(self, worker: Worker, default: SamplingParams) -> None:
        self._worker = worker
        self._default = default
        target = worker.pair.target
        self._name = public_name(target.name)
        self._page = chat_page()
        self._model: dict[str, Any] = {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "specgen",
            "context_length": target.context_limit,
            "specgen": {
                "method": worker.method,
                "lossless": methods.find(worker.method).lossless,
                "temperature": default.temperature,
            },
        }

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok", "waiting": self._worker.waiting})

    async def chat_page(self, _: Request) -> Response:
        return Response(self._page.html, media_type="text/html", headers=self._page.headers)

    async def docs(self, request: Request) -> Response:
        return Response(
            page(self._name, str(request.base_url)), media_type="text/html", headers=_PAGE_HEADERS
        )

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model)

    async def chat(self, request: Request) -> Response:
        body = parsed(await _body(request), ChatRequest)
        if body.asked_grammar is not None:
            await asyncio.to_thread(body.check_grammar)  # streams go on meanwhile
        return await self._answer(request, body, body.asked(self._default), ChatAnswers)

    async def complete(self, request: Request) -> Response:
        body = parsed(await _body(request), CompletionRequest)
        return await self._answer(request, body, body.asked(self._default), CompletionAnswers)

    async def _answer(
        self, request: Request, body: Common, asked: Asked, kind: type[Answers]
    ) -> Response:
        """Returns the answers, for which it waits unless they are streamed."""
        self._check_model(body.model)
        options = body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        answers = kind(
            self._name,
            has_rounds=asked.rounds,
            has_usage=has_usage,
            has_log_probs=asked.sampling.logprobs is not None,
        )
        job = self._worker.submit(asked)
        if body.stream:
            return EventStream(_lines(job, answers), lambda: self._worker.cancel(job))
        try:
            events = await _unless_gone(request.receive, _all_events(job))
        except BaseException:
            self._worker.cancel(job)
            raise
        return _json(answers.complete(events))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self._name):
            problem = f"this server has one model, {self._name}"
            raise ApiError(404, problem, param="model", code="model_not_found")


# the description runs no scripts, and loads nothing
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class EventStream(Response):
    """An answer that is sent while it is generated, as server-sent events. It begins with the first
    of `lines`: what is raised instead of this can still be answered with another status.

    `on_end` is called when it ends, whether it is complete or the client has gone away.
    """

    def __init__(self, lines: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._lines = lines
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent() -> None:
            part = await anext(self._lines)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            async for part in self._lines:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(receive, sent())
        except ClientDisconnect:
            pass
        finally:
            self._on_end()


async def _lines(job: Job, answers: Answers) -> AsyncIterator[bytes]:
    """Yields the events of a stream as it is written, several where they have come together. Raises
    the ApiError with which the answers end before they have begun."""
    has_begun = False
    async for batch in job.batches():
        first = batch[0]
        if not has_begun and isinstance(first, ApiError):
            raise first
        has_begun = True
        yield _events(batch, answers)


def _events(batch: list[Event], answers: Answers) -> bytes:
    lines = [b"data: " + json_line(chunk) + b"\n" for chunk in answers.chunks(batch)]
    last = batch[-1]
    if isinstance(last, ApiError):
        lines.append(b"data: " + json_line(last.body) + b"\n")
    elif not isinstance(last, Done):
        return b"".join(lines)
    return b"".join([*lines, b"data: [DONE]\n\n"])


async def _all_events(job: Job) -> list[Event]:
    events = await job.all_events()
    last = events[-1]
    if isinstance(last, ApiError):
        raise last
    return events


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Raises ClientDisconnect if the client goes away before, and
    ends the work."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        result: T = tasks[0].result()
        return result
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _body(request: Request) -> bytes:
    """Returns a request's body. Raises ApiError if it is too large, or arrives too slowly."""
    parts = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise too_large()
                parts.append(part)
    except TimeoutError as error:
        problem = f"the body has not arrived within {BODY_SECONDS:.0f} seconds"
        raise ApiError(408, problem, code="timeout") from error
    return b"".join(parts)


def public_name(name: str) -> str:
    """Returns what clients call a model: of a path on this machine its last part."""
    path = Path(name)
    return (path.name or path.resolve().name) if path.exists() else name


def _without_address(error: HTTPException, path: str) -> ApiError:
    """Returns the error for a request to an address that is not there, or not for its method."""
    message = "there is nothing at this address"
    if error.status_code == 405:
        message = "this address does not take this method"
    elif path in _NOT_HERE:
        message += f": {_NOT_HERE[path]}"
    return ApiError(error.status_code, message, code="unknown_url")


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_line(content), status, headers, media_type="application/json")
