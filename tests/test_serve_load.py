"""The server under load: the queue, clients that go away, bodies that are none, and its end."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from processes import Forked, is_running, wait_until
from serving import JSON, Gate, Served, serving

import specgen
from specgen.pair.pair import Pair
from specgen.serve import app, queue
from specgen.serve.queue import Job
from specgen.serve.requests import ChatRequest, CompletionRequest

PROMPT = "def fibonacci(n):"
BODY = {"prompt": PROMPT, "max_tokens": 8}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Raw:
    """A connection whose bytes a test writes and reads itself."""

    def __init__(self, served: Served) -> None:
        address = urlsplit(served.address)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=30)
        self._host = address.netloc

    def send(self, body: dict[str, Any], path: str = "/v1/completions") -> Raw:
        sent = json.dumps(body).encode()
        self.begin(len(sent), path)
        self._socket.sendall(sent)
        return self

    def begin(self, length: int, path: str = "/v1/completions") -> None:
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in JSON.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def until(self, text: bytes) -> bytes:
        read = b""
        while text not in read:
            part = self._socket.recv(65536)
            assert part, read
            read += part
        return read

    def close(self) -> None:
        self._socket.close()


def test_as_many_as_asked_wait_and_others_are_refused(demo_pair: Pair, gate: Gate) -> None:
    with serving(demo_pair, queue=2) as served:
        clients = []
        for waiting in (0, 1, 2):
            clients.append(Raw(served).send({**BODY, "max_tokens": 2}))
            assert wait_until(lambda: served.worker._running is not None)
            assert wait_until(lambda expected=waiting: served.worker.waiting == expected)
        status, headers, answer = served.ask("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        assert int(headers["retry-after"]) >= 1
        assert served.ask("/health")[2] == {"status": "ok", "waiting": 2}

        clients[1].close()  # while it waits
        assert wait_until(lambda: served.worker.waiting == 1)
        gate.open(100)
        for client in (clients[0], clients[2]):
            client.until(b'"usage"')
            client.close()
        assert wait_until(lambda: len(served.log) == 3)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_ends_its_answer_within_a_round(
    demo_pair: Pair, gate: Gate, streamed: bool
) -> None:
    with serving(demo_pair, "ar") as served:
        client = Raw(served).send({**BODY, "max_tokens": 64, "stream": streamed, "n": 3})
        gate.open(3)
        if streamed:
            client.until(b"data: ")
        assert wait_until(lambda: gate.rounds == 3)
        running = served.worker._running
        assert running is not None
        client.close()
        assert wait_until(lambda: running.is_cancelled)
        gate.open(1)
        assert wait_until(lambda: served.worker._running is None)
        assert gate.rounds == 3
        assert served.log == [line for line in served.log if "client gone" in line]
        assert "3 new" in served.log[0]
        gate.open(100)
        assert served.ask("/v1/completions", BODY)[0] == 200


def test_a_body_that_arrives_slowly_blocks_nobody(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(demo_pair, queue=0) as served:
        slow = [Raw(served) for _ in range(4)]
        for client in slow:
            client.begin(100)
        assert served.ask("/v1/completions", BODY)[0] == 200
        for client in slow:
            client.close()
        monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
        late = Raw(served)
        late.begin(100)
        assert b" 408 " in late.until(b"\r\n")
        late.close()


def test_a_body_that_is_too_long_is_not_waited_for(demo_pair: Pair) -> None:
    with serving(demo_pair) as served:
        client = Raw(served)
        client.begin((16 << 20) + 1)
        assert b" 413 " in client.until(b"\r\n")
        client.close()


def test_many_clients_at_once_get_their_own_answers_in_order(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    prompts = [PROMPT, "The sea", "import os", "A recipe for", "class Stack:"]
    expected = {text: demo_pair.generate(text, "svip", max_new_tokens=8).text for text in prompts}
    submitted: list[Job] = []
    generated: list[Job] = []
    submit, generate = queue.Worker.submit, queue.Worker._generate

    def noted(worker: queue.Worker, asked: queue.Asked) -> Job:
        submitted.append(submit(worker, asked))
        return submitted[-1]

    def noted_start(worker: queue.Worker, job: Job) -> None:
        generated.append(job)
        generate(worker, job)

    monkeypatch.setattr(queue.Worker, "submit", noted)
    monkeypatch.setattr(queue.Worker, "_generate", noted_start)
    plan = [(rng.choice(prompts), rng.random() < 0.3, rng.random() < 0.5) for _ in range(200)]

    def ask(number: int) -> None:
        text, goes_away, streamed = plan[number]
        body = {"prompt": text, "max_tokens": 8, "stream": streamed}
        if goes_away:
            client = Raw(served).send(body)
            if streamed and number % 2:
                client.until(b"data: ")
            client.close()
            return
        status, _, answer = served.ask("/v1/completions", body)
        assert status == 200
        if streamed:
            chunks = [json.loads(line[6:]) for line in answer.split("\n\n") if "{" in line]
            found = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            found = answer["choices"][0]["text"]
        assert found == expected[text]

    def resident() -> int:
        """The bytes of this process that are in memory."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def used() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with serving(
        demo_pair, queue=64
    ) as served:  # clients that have gone may wait too, for a moment
        before = used()
        objects = []
        sizes = []
        for half in (range(100), range(100, 200)):
            with ThreadPoolExecutor(16) as clients:
                list(clients.map(ask, half))
            assert wait_until(lambda: served.worker._running is None and not served.worker.waiting)
            assert wait_until(lambda: used() <= before), (before, used())
            gc.collect()
            known = {*map(id, submitted), *map(id, generated)}
            objects.append(sum(id(thing) not in known for thing in gc.get_objects()))
            sizes.append(resident())
        assert objects[1] - objects[0] < 2000, "fewer than 20 for each request"
        assert sizes[1] - sizes[0] < 4 << 20, "less than 41 KiB for each request"
    assert generated == [job for job in submitted if job in {*generated}]
    assert len(generated) >= 140
    submitted.clear()
    generated.clear()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Job)]


STRANGE: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, -(10**30), "", "\x00", "\u202e", "x" * 1000, [], {}, [[]],
    [None], {"type": "x"}, ["a", 1], [[1, "a"]], [[10**9]], [-1], {"a": {"b": []}},
]  # fmt: skip
FIELDS = [*ChatRequest.model_fields, *CompletionRequest.model_fields]


def malformed(rng: random.Random) -> bytes:
    """A body with a strange value in a field or two, some with bytes changed or cut off."""
    body: dict[str, Any] = {
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
    }
    for _ in range(rng.randint(1, 2)):
        body[rng.choice(FIELDS)] = rng.choice(STRANGE)
    if rng.random() < 0.3:
        body["messages"] = [{"role": rng.choice(STRANGE), "content": rng.choice(STRANGE)}]
    text = bytearray(json.dumps(body if rng.random() < 0.9 else rng.choice(STRANGE)).encode())
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        if text:
            text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.1 else text)


def test_no_body_makes_the_server_fail(demo_pair: Pair) -> None:
    rng = random.Random(11)
    bodies = [malformed(rng) for _ in range(300)]
    bodies += [b"", b"[" * 100_000, b'{"prompt":' * 5000, b"1" * 10_000, b'{"n":1e999}', b"\xff"]
    bodies += [b'{"prompt": "\\ud800", "max_tokens": 1}', b"NaN", b'{"seed": ' + b"9" * 5000 + b"}"]
    with serving(demo_pair, "ar") as served:
        statuses = set()
        for number, body in enumerate(bodies):
            path = ("/v1/completions", "/v1/chat/completions")[number % 2]
            if b'"max_tokens": 1' not in body and body.startswith(b'{"p'):
                continue  # it may be an answer as long as the context
            status, _, answer = served.ask(path, body)
            statuses.add(status)
            assert status < 500, body
            if status != 200:
                assert isinstance(answer["error"]["message"], str), body
        assert {200, 400} <= statuses
        assert served.ask("/v1/completions", BODY)[0] == 200


def test_a_failure_while_generating_is_told_and_the_server_goes_on(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(demo_pair) as served:
        for error, message in (
            (specgen.base.errors.RunError("the weights are damaged"), "the weights are damaged"),
            (MemoryError(), "out of memory"),
            (KeyError("secret"), "internal error: KeyError"),
        ):

            def fail(*_: object, error: Exception = error) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(Pair, "run", fail)
                for streamed in (False, True):
                    status, _, answer = served.ask("/v1/completions", {**BODY, "stream": streamed})
                    assert (status, answer["error"]["type"]) == (500, "server_error")
                    assert message in answer["error"]["message"]
        assert served.ask("/v1/completions", BODY)[0] == 200
        assert "secret" not in "".join(served.log)


def test_a_failure_in_the_middle_ends_the_stream_with_the_error(
    demo_pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(demo_pair) as served:
        client = Raw(served).send({**BODY, "max_tokens": 64, "stream": True})
        gate.open(2)
        client.until(b"data: ")
        served.server.end()
        served.worker.end_running()
        gate.open(1)
        text = client.until(b"[DONE]")
        assert b"the server is ending" in text
        client.close()


# the process


def address_in(process: Forked) -> str:
    """The address that the command prints, once it serves there."""
    for line in process.stderr:
        if line.startswith(b"serving at "):
            return line.split()[2].decode().removesuffix("/v1,")
    raise AssertionError("it ended")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_and_what_it_started(number: int, code: int) -> None:
    process = Forked("serve", "--port", "0", "-m", "pearl", "--set", "window=4")
    address = urlsplit(address_in(process))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children, "PEARL's draft model"
    place = (address.hostname, address.port)
    with socket.create_connection(place, timeout=60) as client:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        text = client.recv(65536)
        process.send_signal(number)
        while part := client.recv(65536):
            text += part
    assert text.count(b"data: ") > 2
    assert b'"finish_reason": "stop"' in text, "the answer is finished"
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    out, err = process.communicate(60)
    assert (process.returncode, out) == (code, b"")
    assert b"Traceback" not in err
    assert wait_until(lambda: not any(is_running(int(child)) for child in children))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(place, timeout=5)


def test_a_second_signal_ends_it_at_once(demo_pair: Pair, gate: Gate) -> None:
    with serving(demo_pair) as served:
        client = Raw(served).send({**BODY, "max_tokens": 64, "stream": True})
        gate.open(2)
        client.until(b"data: ")
        begin = time.monotonic()
        served.server._on_signal(signal.SIGTERM, None)
        served.server._on_signal(signal.SIGTERM, None)
        gate.open(1)
        assert b"the server is ending" in client.until(b"[DONE]")
        assert time.monotonic() - begin < 30
        client.close()
