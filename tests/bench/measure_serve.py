"""Measures what the server adds to `generate`: the time to the first token and tokens/s of the same
answers, made directly and through the server, in one process with the same loaded models.

    python tests/bench/measure_serve.py [--target MODEL] [--method NAME] [--repeats 7] [-n 128]
    python tests/bench/measure_serve.py --target MODEL --turns 10

Both ways take turns, and each begins with empty caches. All answers have the same number of tokens:
the end of a sequence is ignored. Directly, an answer's text is made round by round, as `generate`
shows it. The client is another process, which keeps its connection, and measures from the request
to the first piece of text and to the end. `--turns N` measures a conversation of N turns instead:
what the cached prefix leaves of the time to the first token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.text.stop_strings import StopStrings
from specgen.pair.pair import Pair
from specgen.serve.access import Access
from specgen.serve.app import make_app
from specgen.serve.queue import Worker
from specgen.serve.server import Server, address_of, listen_at
from specgen.view.generation import AnswerText

DEFAULT = SamplingParams(ignore_eos=True)
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Describe how a bicycle stays upright.",
    "List ten uses of an old newspaper.",
)
QUESTIONS = (
    "Tell me about the history of lighthouses.",
    "Who built the first ones?",
    "How were they lit?",
    "What did the keepers do all day?",
    "Which lighthouse is the tallest?",
    "Are there still keepers today?",
    "How far can the light be seen?",
    "What is a Fresnel lens?",
    "Can one stay in a lighthouse overnight?",
    "Summarise what you have told me.",
)


class Answer(NamedTuple):
    """An answer with its `usage`, the seconds until its first text, and until its end."""

    text: str
    usage: dict[str, Any]
    first: float
    total: float

    @property
    def speed(self) -> float:
        """Tokens per second after the first."""
        return (self.usage["completion_tokens"] - 1) / (self.total - self.first)


def ask(connection: http.client.HTTPConnection, body: dict[str, Any]) -> Answer:
    """Asks for an answer, and reads it as it is sent."""
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(sent).encode(),
        {"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
    text = ""
    first = 0.0
    usage: dict[str, Any] = {}
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise SystemExit(chunk["error"]["message"])
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            first = first or (time.perf_counter() - begin if text else 0.0)
        usage = chunk["usage"] or usage
    total = time.perf_counter() - begin
    return Answer(text, usage, first, total)


def answer_requests() -> None:
    """The client's process: asks for the body in each line of standard input, after the address in
    the first one."""
    connection = http.client.HTTPConnection(urlsplit(sys.stdin.readline().strip()).netloc)
    for line in sys.stdin:
        print(json.dumps(ask(connection, json.loads(line))), flush=True)
    connection.close()


class Client:
    """A client in a process of its own."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(address)

    def ask(self, body: dict[str, Any]) -> Answer:
        assert self._process.stdout is not None
        self._write(json.dumps(body))
        return Answer(*json.loads(self._process.stdout.readline()))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._process.communicate()


def direct(pair: Pair, method: str, prompt: str, length: int) -> Answer:
    """The same answer without the server."""
    begin = time.perf_counter()
    messages = [{"role": "user", "content": prompt}]
    request = pair.request(messages, method, replace(DEFAULT, max_new_tokens=length))
    tokenizer = pair.tokenizer
    stop = StopStrings.of(request.sampling.stop, tokenizer)
    answer = AnswerText(tokenizer.detokenizer(request.prompt_ids), stop)
    first = 0.0
    tokens = 0
    for round_ in pair.run(request).rounds():
        answer.add(round_)
        first = first or time.perf_counter() - begin
        tokens += len(round_.token_ids)
    return Answer(answer.text, {"completion_tokens": tokens}, first, time.perf_counter() - begin)


@contextmanager
def serving(pair: Pair, method: str, default: SamplingParams) -> Iterator[str]:
    """Serves the pair, and yields the address. `default` is for what requests leave out."""
    worker = Worker(pair, method, {}, 16)
    listening = listen_at("127.0.0.1", 0)
    is_open = threading.Event()
    app = make_app(worker, default, Access("127.0.0.1"))
    server = Server(app, worker, listening, is_open.set)
    thread = threading.Thread(target=server.run)
    thread.start()
    is_open.wait()
    try:
        yield address_of(listening)
    finally:
        server.end()
        thread.join()


def compare(pair: Pair, method: str, client: Client, repeats: int, length: int) -> None:
    """Prints the medians of both ways, and the ratio of the server's to the direct one's."""
    ways: dict[str, Callable[[str], Answer]] = {
        "direct": lambda prompt: direct(pair, method, prompt, length),
        "server": lambda prompt: client.ask(
            {"messages": [{"role": "user", "content": prompt}], "max_tokens": length}
        ),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):  # the first is not counted
        for prompt in PROMPTS:
            for name in sorted(ways, reverse=repeat % 2 == 0):
                pair.forget()
                answer = ways[name](prompt)
                if repeat >= 0:
                    found[name].append((answer.first, answer.speed))
    medians = {
        name: [median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    for name, (first, speed) in medians.items():
        print(f"{name}: first token {1000 * first:.2f} ms, then {speed:.1f} tokens/s")
    pairs = list(zip(found["server"], found["direct"], strict=True))
    first = median(served[0] / own[0] for served, own in pairs)
    speed = median(served[1] / own[1] for served, own in pairs)
    more = median(served[0] - own[0] for served, own in pairs)
    print(f"server/direct: first token {first:.3f} ({1000 * more:+.2f} ms), tokens/s {speed:.3f}")


def converse(pair: Pair, client: Client, turns: int, length: int) -> None:
    """Prints the time to the first token of each turn of a conversation."""
    pair.forget()
    messages: list[dict[str, str]] = []
    print("turn  prompt  cached  first token ms  tokens/s")
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        answer = client.ask({"messages": messages, "max_tokens": length})
        messages.append({"role": "assistant", "content": answer.text})
        prompt = answer.usage["prompt_tokens"]
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        print(
            f"{turn + 1:4}  {prompt:6,}  {cached:6,}  {1000 * answer.first:14.1f}  "
            f"{answer.speed:8.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--target", "-t")
    parser.add_argument("--draft", "-d")
    parser.add_argument("--method", "-m", default="adaptive")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        answer_requests()
        return
    with specgen.load(options.target, options.draft) as pair:
        pair.warm_up(sequential=True)
        default = SamplingParams() if options.turns else DEFAULT
        with serving(pair, options.method, default) as address:
            client = Client(address)
            try:
                if options.turns:
                    converse(pair, client, options.turns, options.n)
                else:
                    compare(pair, options.method, client, options.repeats, options.n)
            finally:
                client.close()


if __name__ == "__main__":
    main()
