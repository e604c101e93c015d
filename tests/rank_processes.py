"""Two processes as torchrun starts them, forked from a server that has imported the libraries."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from processes import _FORKSERVER, Forked

from specgen.base.types import SamplingParams

SIZE = 2


def environments() -> list[dict[str, str]]:
    """The environment variables that torchrun would add, for each of the `SIZE` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    common["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(SIZE)]


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def commands(*arguments: str) -> list[Forked]:
    """Starts `specgen` with these arguments as process 0 and as process 1 of a torchrun job."""
    started = []
    for environment in environments():
        with changed_environment(environment):
            started.append(Forked(*arguments))
    return started


def _serve(environment: Mapping[str, str], requests: Connection | None) -> None:
    """Runs one process of a torchrun job. Process 0 answers the requests that it receives, until it
    receives None.

    `requests` is None in process 1, in which `specgen.load` never returns.
    """
    os.environ.update(environment)
    import torch

    import specgen

    torch.set_num_threads(1)
    pairs: dict[Any, specgen.Pair] = {}
    if requests is None:
        specgen.load()
        raise AssertionError("process 1 has returned from load")
    while (request := requests.recv()) is not None:
        models, what, *arguments = request
        try:
            if models not in pairs:
                pairs[models] = specgen.load(*models, device="cpu", dtype="float32")
            requests.send(getattr(_Answers, what)(pairs[models], *arguments))
        except specgen.SpecgenError as error:
            requests.send(error)
    for pair in pairs.values():
        pair.close()


class _Answers:
    @staticmethod
    def generate(
        pair: Any,
        prompt: Any,
        method: str,
        sampling: SamplingParams,
        settings: Mapping[str, object],
    ) -> Any:
        pair.prepare(pair.request(prompt, method, sampling, **settings))
        return pair.generate(prompt, method, sampling, **settings).token_ids

    @staticmethod
    def likelihood(pair: Any, prompt: Any, ids: list[int]) -> float:
        return float(pair.log_likelihood(prompt, ids))

    @staticmethod
    def facts(pair: Any) -> dict[str, Any]:
        """The sizes of the target's share that rank 0 holds."""
        model = pair.target.model
        return {
            "kv_heads": model.shard.local.num_kv_heads,
            "heads": model.shard.local.num_heads,
            "embedding": list(model.outer.embedding.shape),
        }


class RankPair:
    """Two processes that each hold half of every target. `ask` sends a request for the models
    (target, draft) to process 0: the name of a function in `_Answers` and its arguments."""

    def __init__(self) -> None:
        self._requests, theirs = _FORKSERVER.Pipe()
        first, second = environments()
        self.processes = [
            _FORKSERVER.Process(target=_serve, args=(environment, requests))
            for environment, requests in ((first, theirs), (second, None))
        ]
        for process in self.processes:
            process.start()
        theirs.close()

    def ask(self, models: tuple[str | None, str | None], what: str, *arguments: Any) -> Any:
        self._requests.send((models, what, *arguments))
        assert self._requests.poll(60), "no answer"
        answer = self._requests.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> list[int | None]:
        self._requests.send(None)
        for process in self.processes:
            process.join(20)
        return [process.exitcode for process in self.processes]
