"""Training batches made of generated documents."""

from __future__ import annotations

from typing import Any

import torch

from specgen.demo.corpus.documents import DOMAIN_SHARES, document, document_rng

_POOL_SIZE = 64  # documents to choose from: almost always one of them fits into what is left of a sequence


class TokenStream:
    """Token sequences packed from documents in the proportions of DOMAIN_SHARES. The same seed gives the same sequences.

    Each document is wrapped in <s> ... </s>. A sequence starts with the oldest document of a pool, then takes the longest one
    that fits, again and again. Documents stay whole, so an article and its summary are in the same sequence; only the last
    document is cut off where the sequence ends, and its rest is dropped. There are no padding tokens.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rngs = {domain: document_rng(domain, seed) for domain in DOMAIN_SHARES}
        self._used = dict.fromkeys(DOMAIN_SHARES, 0)  # tokens per domain
        self._pool: list[list[int]] = []  # oldest first

    def batch(self, size: int, length: int) -> torch.Tensor:
        """The next `size` sequences, int64 [size, length + 1] on the CPU: `length` inputs and, one token later, their labels."""
        return torch.tensor([self._next_sequence(length + 1) for _ in range(size)], dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        """Returns the state of the stream, from which `restore` continues: nested dictionaries, lists, tuples and numbers."""
        return {
            "rngs": {domain: rng.getstate() for domain, rng in self._rngs.items()},
            "used": dict(self._used),
            "pool": [list(tokens) for tokens in self._pool],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what state() returned for a stream with the same tokenizer and corpus."""
        for domain, rng_state in state["rngs"].items():
            self._rngs[domain].setstate(rng_state)
        self._used = dict(state["used"])
        self._pool = [list(tokens) for tokens in state["pool"]]

    def _next_sequence(self, length: int) -> list[int]:
        self._fill_pool()
        sequence = self._pool.pop(0)[:length]  # the oldest, so that no document stays in the pool for ever
        while len(sequence) < length:
            self._fill_pool()
            room = length - len(sequence)
            fitting = [index for index, tokens in enumerate(self._pool) if len(tokens) <= room]
            longest = max(fitting, key=lambda index: len(self._pool[index]), default=0)
            sequence += self._pool.pop(longest)[:room]
        return sequence

    def _fill_pool(self) -> None:
        while len(self._pool) < _POOL_SIZE:
            domain = min(DOMAIN_SHARES, key=lambda name: self._used[name] / DOMAIN_SHARES[name])  # furthest below its share
            tokens = self._encode(document(domain, self._rngs[domain]))
            self._used[domain] += len(tokens)
            self._pool.append(tokens)

    def _encode(self, text: str) -> list[int]:
        # Calling the transformers wrapper would take longer than encoding a short document.
        ids = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return [self._tokenizer.bos_token_id, *ids, self._tokenizer.eos_token_id]
