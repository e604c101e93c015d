"""The corpus as training batches: windows of token ids without end, that an interrupted run can take up again."""

from __future__ import annotations

import random
from array import array
from itertools import islice
from typing import Any

import torch

from specgen.demo.corpus import documents
from specgen.demo.tokenizer import MIX

STRETCH = 1500
"""Tokens taken of a longer code file, so that files and domains interleave."""


class TokenStream:
    """Windows in the proportions of MIX, documents wrapped in <s> ... </s>; the same for the same seed and corpus.

    A window overlaps the one before by a single token: the last one predicted is the next one's first input.
    """

    def __init__(self, tokenizer: Any, seed: int, window: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._window = window
        self._documents = {domain: documents(domain, seed) for domain in MIX}
        self._drawn = dict.fromkeys(MIX, 0)  # documents, by domain
        self._used = dict.fromkeys(MIX, 0)  # tokens, by domain
        self._buffer: list[int] = []
        self._rng = random.Random(f"stretch-{seed}")
        # Code files come round again, and a stretch of each is used: encoding them anew would be most of the work.
        self._encoded: dict[str, array[int]] = {}

    def batch(self, size: int) -> torch.Tensor:
        """The next `size` windows: int64 [size, window + 1], on the CPU."""
        return torch.tensor([self._next_window() for _ in range(size)], dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, in numbers, lists and tuples."""
        return {
            "drawn": dict(self._drawn),
            "used": dict(self._used),
            "buffer": list(self._buffer),
            "random": self._rng.getstate(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken from a stream of the same seed. Documents are skipped, not encoded: fast."""
        self._documents = {domain: documents(domain, self._seed) for domain in MIX}
        for domain, count in state["drawn"].items():
            next(islice(self._documents[domain], count, count), None)
        self._drawn = dict(state["drawn"])
        self._used = dict(state["used"])
        self._buffer = list(state["buffer"])
        self._rng.setstate(state["random"])

    def _next_window(self) -> list[int]:
        while len(self._buffer) <= self._window:
            # The domain that lags most behind its share.
            domain = min(MIX, key=lambda name: self._used[name] / MIX[name])
            tokens = self._next_document(domain)
            self._used[domain] += len(tokens) + 2
            self._buffer += [self._tokenizer.bos_token_id, *tokens, self._tokenizer.eos_token_id]
        window = self._buffer[: self._window + 1]
        del self._buffer[: self._window]
        return window

    def _next_document(self, domain: str) -> array[int]:
        text = next(self._documents[domain])
        self._drawn[domain] += 1
        if domain != "code":
            return self._encode(text)
        if text not in self._encoded:
            self._encoded[text] = self._encode(text)
        tokens = self._encoded[text]
        if len(tokens) <= STRETCH:
            return tokens
        start = self._rng.randrange(len(tokens) - STRETCH)
        return tokens[start : start + STRETCH]

    def _encode(self, text: str) -> array[int]:
        # Past the wrapper, which costs more than the encoding of a short document and warns about long ones.
        return array("i", self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
