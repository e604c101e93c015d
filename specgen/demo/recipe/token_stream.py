"""The corpus as training batches: windows of whole documents without end, that an interrupted run can take up again."""

from __future__ import annotations

from typing import Any

import torch

from specgen.demo.corpus.documents import MIX, document, source

_POOL = 64  # documents to choose from: what is left of a window finds one that fits nearly always


class TokenStream:
    """Windows in the proportions of MIX, documents wrapped in <s> ... </s>; the same for the same seed and corpus.

    Documents are packed whole, the longest that still fits each time, so that an article and its summary are in one window. The
    few tokens that are left in the end are the beginning of one more; its rest is dropped, which costs nothing, for documents are
    made on the spot. So no token is padding.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._sources = {domain: source(domain, seed) for domain in MIX}
        self._used = dict.fromkeys(MIX, 0)  # tokens, by domain
        self._pool: list[list[int]] = []  # the oldest first

    def batch(self, size: int, window: int) -> torch.Tensor:
        """The next `size` windows: int64 [size, window + 1], on the CPU."""
        return torch.tensor([self._next_window(window + 1) for _ in range(size)], dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, in numbers, lists and tuples."""
        return {
            "sources": {domain: rng.getstate() for domain, rng in self._sources.items()},
            "used": dict(self._used),
            "pool": [list(document) for document in self._pool],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken from a stream of the same corpus."""
        for domain, numbers in state["sources"].items():
            self._sources[domain].setstate(numbers)
        self._used = dict(state["used"])
        self._pool = [list(document) for document in state["pool"]]

    def _next_window(self, room: int) -> list[int]:
        self._fill()
        window = self._pool.pop(0)[:room]  # the oldest: no document waits for ever
        while len(window) < room:
            self._fill()
            left = room - len(window)
            fitting = [place for place, tokens in enumerate(self._pool) if len(tokens) <= left]
            if not fitting:
                window += self._pool.pop(0)[:left]
            else:
                window += self._pool.pop(max(fitting, key=lambda place: len(self._pool[place])))
        return window

    def _fill(self) -> None:
        while len(self._pool) < _POOL:
            # The domain that lags most behind its share.
            domain = min(MIX, key=lambda name: self._used[name] / MIX[name])
            tokens = self._encode(document(domain, self._sources[domain]))
            self._used[domain] += len(tokens)
            self._pool.append(tokens)

    def _encode(self, text: str) -> list[int]:
        # Past the wrapper, which costs more than the encoding of a short document.
        ids = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return [self._tokenizer.bos_token_id, *ids, self._tokenizer.eos_token_id]
