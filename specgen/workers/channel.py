"""Messages between a pair's process and its draft worker: a header, then as many bytes as it says. Imports no torch."""

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
_ASKED = struct.Struct("<IIIIII")  # committed, pending and observed numbers that follow; limit; slot; run
_DRAFTED = struct.Struct("<IId")  # tokens, bytes of the reason, seconds
_POLL = 2.0  # seconds between two looks at whether the other side is still there


class Kind(IntEnum):
    """What a message is. The first five go to the worker; those with a JSON payload are sent once a load or a run."""

    LOAD = 1  # JSON: which model
    BEGIN = 2  # JSON: a run, whose number is the message's; the worker reads its prompt at once
    DRAFT = 3  # `DraftRequest`
    END = 4  # JSON: the number of a run that is over
    FORGET = 5  # drop the cache
    READY = 6  # the model is loaded
    DRAFTED = 7  # `pack_draft`
    FAILED = 8  # JSON: what went wrong


class ChannelClosedError(Exception):
    """The other side closed its end."""


class Channel:
    """Reads from one file descriptor and writes to another. An exchange that was interrupted leaves it unusable."""

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
        """Until there is something to read. Raises ChannelClosedError where `parent` is not this process's parent any more.

        A parent that dies closes the pipe, unless some other child of its holds a copy of its end.
        """
        if self._read or sys.platform == "win32":
            return
        while not select.select([self._in], [], [], _POLL)[0]:
            if os.getppid() != parent:
                raise ChannelClosedError


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A draft to be made: tokens committed since the last message, tokens still to be judged, what the policy is to be told
    (drafted and accepted in turn), the longest draft, the slot of the shared memory for its distributions, and the run."""

    committed: Sequence[int]
    pending: Sequence[int]
    observed: Sequence[int]
    limit: int
    slot: int
    run: int

    def pack(self) -> bytes:
        sizes = len(self.committed), len(self.pending), len(self.observed)
        numbers = array("i", [*self.committed, *self.pending, *self.observed])
        return _ASKED.pack(*sizes, self.limit, self.slot, self.run) + numbers.tobytes()

    @classmethod
    def unpack(cls, payload: bytes) -> DraftRequest:
        committed, pending, observed, *rest = _ASKED.unpack_from(payload)
        numbers = array("i", payload[_ASKED.size :]).tolist()
        end = committed + pending
        return cls(numbers[:committed], numbers[committed:end], numbers[end : end + observed], *rest)


def pack_draft(draft: Draft, seconds: float) -> bytes:
    """A chain less its distributions, and the seconds that it took to make."""
    reason = (draft.stop_reason or "").encode()
    figures = array("d", [*draft.entropies, *draft.top_probs])
    return (
        _DRAFTED.pack(len(draft.tokens), len(reason), seconds) + reason + array("i", draft.tokens).tobytes() + figures.tobytes()
    )


def unpack_draft(payload: bytes) -> tuple[Draft, float]:
    length, reason_length, seconds = _DRAFTED.unpack_from(payload)
    tokens_at = _DRAFTED.size + reason_length
    figures_at = tokens_at + array("i").itemsize * length
    tokens = array("i", payload[tokens_at:figures_at]).tolist()
    figures = array("d", payload[figures_at:]).tolist()
    reason = payload[_DRAFTED.size : tokens_at].decode() or None
    return Draft(tokens, range(-1, length - 1), None, figures[:length], figures[length:], reason), seconds
