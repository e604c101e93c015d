"""Messages between a pair's process and its draft worker: a header with its length, then a payload. Imports no torch."""

from __future__ import annotations

import os
import select
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from specgen.types import Draft

_HEADER = struct.Struct("<IBI")  # length of the payload, kind, serial number
_REQUEST = struct.Struct("<IIIIII")  # counts of committed, unverified and observed numbers; limit; slot; run
_ANSWER = struct.Struct("<IId")  # tokens, bytes of the reason, seconds
_POLL = 2.0  # seconds between two checks that the parent process is alive


class Kind(IntEnum):
    """The kinds of messages. The first five go to the worker; those with a JSON payload are sent once a load or a run."""

    LOAD = 1  # JSON: the model to load
    BEGIN = 2  # JSON: a run; its number is the message's serial number; the worker runs the prompt at once
    DRAFT = 3  # `DraftRequest`
    END = 4  # JSON: the number of a run that ended
    FORGET = 5  # clear the KV cache
    READY = 6  # the model is loaded
    DRAFTED = 7  # `pack_draft`
    FAILED = 8  # JSON: the error


class ChannelClosedError(Exception):
    """The other side closed its end."""


class Channel:
    """Reads from one file descriptor and writes to another. Unusable after an interrupted exchange."""

    def __init__(self, read_from: int, write_to: int) -> None:
        self._in, self._out = read_from, write_to
        self._read = bytearray()

    def send(self, kind: Kind, serial: int, payload: bytes = b"") -> None:
        """Raises ChannelClosedError."""
        data = memoryview(_HEADER.pack(len(payload), kind, serial) + payload)
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:
            raise ChannelClosedError from error

    def receive(self) -> tuple[Kind, int, bytes]:
        """The next message's kind, serial number and payload. Raises ChannelClosedError."""
        self._fill(_HEADER.size)
        length, kind, serial = _HEADER.unpack_from(self._read)
        end = _HEADER.size + length
        self._fill(end)
        payload = bytes(self._read[_HEADER.size : end])
        del self._read[:end]
        return Kind(kind), serial, payload

    def _fill(self, size: int) -> None:
        while len(self._read) < size:
            try:
                found = os.read(self._in, 1 << 20)
            except OSError as error:
                raise ChannelClosedError from error
            if not found:
                raise ChannelClosedError
            self._read += found

    def wait(self, parent: int) -> None:
        """Wait for a message. Raises ChannelClosedError once `parent` is no longer this process's parent.

        A parent that dies closes the pipe, unless another of its children has inherited a copy of its end.
        """
        if self._read or sys.platform == "win32":
            return
        while not select.select([self._in], [], [], _POLL)[0]:
            if os.getppid() != parent:
                raise ChannelClosedError


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft of at most `limit` tokens.

    `committed` are the tokens committed since the last request, `unverified` those pending verification. `observed` are numbers
    of drafted and accepted tokens, alternating, for the policy. The distributions go to `slot` (0 or 1) of shared memory.
    """

    committed: Sequence[int]
    unverified: Sequence[int]
    observed: Sequence[int]
    limit: int
    slot: int
    run: int

    def pack(self) -> bytes:
        sizes = len(self.committed), len(self.unverified), len(self.observed)
        numbers = array("i", [*self.committed, *self.unverified, *self.observed])
        return _REQUEST.pack(*sizes, self.limit, self.slot, self.run) + numbers.tobytes()

    @classmethod
    def unpack(cls, payload: bytes) -> DraftRequest:
        committed, unverified, observed, *rest = _REQUEST.unpack_from(payload)
        numbers = array("i", payload[_REQUEST.size :]).tolist()
        end = committed + unverified
        return cls(numbers[:committed], numbers[committed:end], numbers[end : end + observed], *rest)


def pack_draft(draft: Draft, seconds: float) -> bytes:
    """A chain without its distributions, and the seconds that it took."""
    reason = (draft.stop_reason or "").encode()
    statistics = array("d", [*draft.entropies, *draft.top_probs])
    return (
        _ANSWER.pack(len(draft.tokens), len(reason), seconds) + reason + array("i", draft.tokens).tobytes() + statistics.tobytes()
    )


def unpack_draft(payload: bytes) -> tuple[Draft, float]:
    length, reason_length, seconds = _ANSWER.unpack_from(payload)
    tokens_at = _ANSWER.size + reason_length
    statistics_at = tokens_at + array("i").itemsize * length
    tokens = array("i", payload[tokens_at:statistics_at]).tolist()
    statistics = array("d", payload[statistics_at:]).tolist()
    reason = payload[_ANSWER.size : tokens_at].decode() or None
    return Draft.chain(tokens, entropies=statistics[:length], top_probs=statistics[length:], stop_reason=reason), seconds
