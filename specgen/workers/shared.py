"""The memory that a draft worker shares with its parent: who has asked for what, the tokens drafted so far, and their tensors.

A message through a socket wakes a sleeping process, which takes longer than a small model's pass. So both processes first watch
numbers here for a moment. Each is one aligned 64-bit word with one writer, and carries the serial number of its request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from math import prod
from mmap import mmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from specgen.decoding.drafting import Setup

SIZE = 4096  # bytes at the start of the memory that hold the words
_ASKED, _ANSWERED, _CUT, _PREFILLED, _DRAFTED = 0, 1, 2, 3, 8  # their positions; the last is that of the first token
_LONGEST = SIZE // 8 - _DRAFTED
_TOKEN_BITS = 32
_TOKEN = (1 << _TOKEN_BITS) - 1
_WATCH = 5e-3  # seconds


class SharedWords:
    """The words, mapped from the file descriptor `memory`, which has at least `SIZE` bytes. Imports no torch."""

    def __init__(self, memory: int) -> None:
        self._words = memoryview(mmap(memory, SIZE)).cast("q")

    def ask(self, serial: int) -> None:
        """The parent has sent the request with this serial number."""
        self._words[_ASKED] = serial

    def answer(self, serial: int) -> None:
        """The worker has sent the answer to this request."""
        self._words[_ANSWERED] = serial

    def cut(self, serial: int) -> None:
        """The parent asks the worker to end the draft of this request."""
        self._words[_CUT] = serial

    def prefill(self, done: int, total: int) -> None:
        """The worker has run `done` of a prompt's `total` tokens."""
        self._words[_PREFILLED] = total << _TOKEN_BITS | done

    @property
    def prefilled(self) -> tuple[int, int]:
        """The arguments of the last call of `prefill`; (0, 0) before the first."""
        return self._words[_PREFILLED] & _TOKEN, self._words[_PREFILLED] >> _TOKEN_BITS

    def await_request(self, after: int) -> bool:
        """The worker waits a moment for a request later than `after`. Returns whether there is one."""
        return _watch(lambda: self._words[_ASKED] > after)

    def await_answer(self, serial: int) -> bool:
        """The parent waits a moment for the answer to this request. Returns whether there is one."""
        return _watch(lambda: self._words[_ANSWERED] >= serial)

    def show(self, serial: int, position: int, token: int) -> bool:
        """The worker has drafted the token with this number, from 0, for this request. Returns whether the draft may go on."""
        if position < _LONGEST:
            self._words[_DRAFTED + position] = serial << _TOKEN_BITS | token
        return self._words[_CUT] != serial

    def shown(self, serial: int, count: int) -> list[int]:
        """The tokens drafted for this request so far, at most the first `count`. Does not wait."""
        words = self._words[_DRAFTED : _DRAFTED + count].tolist()
        return [word & _TOKEN for word in takewhile(lambda word: word >> _TOKEN_BITS == serial, words)]

    def await_tokens(self, serial: int, count: int) -> bool:
        """The parent waits a moment for `count` tokens of this request, or its answer. Returns whether one of them is there."""
        last = _DRAFTED + count - 1
        return _watch(lambda: self._words[last] >> _TOKEN_BITS == serial or self._words[_ANSWERED] >= serial)


def _watch(happened: Callable[[], bool]) -> bool:
    if happened():
        return True
    deadline = time.perf_counter() + _WATCH
    while time.perf_counter() < deadline:
        os.sched_yield()  # another process may need this core, the other side among them
        if happened():
            return True
    return False


class SharedDrafts:
    """One run's part of the memory: `probs` if it samples and `logits` if it records, float32 [2, window, vocabulary] each.

    There are two slots, 0 and 1, because one draft is verified while the next is made. `window` is the largest number of tokens
    in a draft. `size` is in bytes; 0 for a run that needs neither tensor.
    """

    def __init__(self, setup: Setup, window: int) -> None:
        needed = {"probs": not setup.sampling.greedy, "logits": setup.record}
        self._fields = [name for name, is_needed in needed.items() if is_needed]
        self._shape = (len(self._fields), 2, window, setup.vocab_size)
        self.size = 4 * prod(self._shape)

    def map(self, memory: int, offset: int) -> None:
        """Maps `size` bytes from `offset` on of the file descriptor `memory`. The file must be large enough already."""
        import torch

        if self.size:
            mapped = mmap(memory, offset + self.size)
            words = torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=prod(self._shape))
            self._tensor = words.view(self._shape)

    def write(self, slot: int, tokens: int, fields: Mapping[str, Any]) -> None:
        """Writes a draft's tensors to a slot. Pads a smaller draft vocabulary: `probs` with zeros, `logits` with -inf."""
        for number, name in enumerate(self._fields):
            memory, values = self._tensor[number, slot, :tokens], fields[name]
            memory[:, : values.shape[-1]].copy_(values)
            memory[:, values.shape[-1] :] = 0.0 if name == "probs" else float("-inf")

    def read(self, slot: int, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the tensors of the slot, on `device`. They stay valid until the second next draft starts."""
        from specgen.engine.devices import upload

        return {name: upload(self._tensor[number, slot, :tokens], device) for number, name in enumerate(self._fields)}
