"""Numbers in the memory that a draft worker shares with its parent: who has asked for what, and the tokens drafted so far.

A message through a socket wakes a sleeping process, which takes longer than a small model's pass. So both processes first watch
these numbers for a moment. Each is one aligned 64-bit word with one writer, and carries the serial number of its request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import takewhile
from mmap import mmap

SIZE = 4096
"""Bytes at the start of the shared memory that hold the numbers."""

# the positions of the words; the last is that of the first token
_ASKED, _ANSWERED, _CUT, _BEATS, _PREFILLED, _DRAFTED = 0, 1, 2, 3, 4, 8
_LONGEST = SIZE // 8 - _DRAFTED
_TOKEN_BITS = 32
_WATCH = 5e-3  # seconds


class SharedFlags:
    """The numbers, mapped from the file descriptor `memory`, which has at least `SIZE` bytes."""

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

    def is_cut(self, serial: int) -> bool:
        return self._words[_CUT] == serial

    def beat(self) -> None:
        """The worker is alive."""
        self._words[_BEATS] += 1

    @property
    def beats(self) -> int:
        """How many times the worker has called `beat`."""
        return self._words[_BEATS]

    def prefill(self, done: int, total: int) -> None:
        """The worker has run `done` of a prompt's `total` tokens."""
        self._words[_PREFILLED] = total << _TOKEN_BITS | done

    @property
    def prefilled(self) -> tuple[int, int]:
        """The arguments of the last call of `prefill`; (0, 0) before the first."""
        word = self._words[_PREFILLED]
        return word & ((1 << _TOKEN_BITS) - 1), word >> _TOKEN_BITS

    def await_request(self, after: int) -> bool:
        """The worker waits a moment for a request later than `after`. Returns whether there is one."""
        return self._watch(lambda: self._words[_ASKED] > after)

    def await_answer(self, serial: int) -> bool:
        """The parent waits a moment for the answer to this request. Returns whether there is one."""
        return self._watch(lambda: self._words[_ANSWERED] >= serial)

    def show(self, serial: int, position: int, token: int) -> None:
        """The worker has drafted the token with this number, from 0, for this request."""
        if position < _LONGEST:
            self._words[_DRAFTED + position] = serial << _TOKEN_BITS | token

    def shown(self, serial: int, count: int) -> list[int]:
        """The tokens drafted for this request so far, at most the first `count`. Does not wait."""
        words = self._words[_DRAFTED : _DRAFTED + count].tolist()
        ours = takewhile(lambda word: word >> _TOKEN_BITS == serial, words)
        return [word & ((1 << _TOKEN_BITS) - 1) for word in ours]

    def await_tokens(self, serial: int, count: int) -> bool:
        """The parent waits a moment for `count` tokens of this request, or its answer. Returns whether one of them is there."""
        last = _DRAFTED + count - 1
        return self._watch(lambda: self._words[last] >> _TOKEN_BITS == serial or self._words[_ANSWERED] >= serial)

    @staticmethod
    def _watch(happened: Callable[[], bool]) -> bool:
        if happened():
            return True
        deadline = time.perf_counter() + _WATCH
        while time.perf_counter() < deadline:
            os.sched_yield()  # another process may need this core, the other side among them
            if happened():
                return True
        return False
