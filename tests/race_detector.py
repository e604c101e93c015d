"""Finds accesses to memory that nothing orders: vector clocks of a host and of the streams of GPUs, as CUDA's sanitizers use.

The host and each stream is an actor. Work on a stream comes after what the host did before it launched the work, after earlier
work of the stream, and after what the stream waits for. All threads of the host are one actor: what orders them is not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOST = "the host"
_OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("race_detector", "fake_cuda", "fake_cuda_tensors", "fake_gpus", "fake_graphs")
)
_PROJECT = str(Path(__file__).resolve().parents[1])
_FRAMES = 4  # lines of the project in the description of a place


class RaceError(RuntimeError):
    """Two accesses to the same memory, at least one of which writes, that nothing orders; or memory that is freed too early."""


def place() -> str:
    """Returns the project's innermost lines that are being run, the innermost first."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < _FRAMES:  # type: ignore[redundant-expr]
        name = frame.f_code.co_filename
        if name.startswith(_PROJECT) and name not in _OWN:
            lines.append(f"{name.removeprefix(_PROJECT + '/')}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


@dataclass(frozen=True, slots=True)
class Access:
    """An access by an actor at a time on its clock. `what` and `place` describe it in messages."""

    actor: Hashable
    time: int
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} on {self.actor} at {self.place}"


class Clocks:
    """For each actor, up to which time of each actor's clock everything has happened before what the actor does next."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Hashable, int]] = {}

    def of(self, actor: Hashable) -> dict[Hashable, int]:
        """Returns the times that the actor knows."""
        return self._known.setdefault(actor, {actor: 0})

    def join(self, actor: Hashable, times: Mapping[Hashable, int]) -> None:
        """Orders what the actor does from now on after these times."""
        known = self.of(actor)
        for other, time in times.items():
            if time > known.get(other, -1):
                known[other] = time

    def access(self, actor: Hashable, what: str) -> Access:
        """Returns an access that the actor makes now."""
        known = self.of(actor)
        known[actor] += 1
        return Access(actor, known[actor], what, place())

    def is_known(self, access: Access, actors: Iterable[Hashable]) -> bool:
        """Whether an access comes before what at least one of the actors does next."""
        return any(access.time <= self.of(actor).get(access.actor, -1) for actor in actors)


@dataclass(eq=False)
class Memory:
    """The accesses to some memory: the last write, and each actor's last read since then."""

    name: str
    clocks: Clocks
    last_write: Access | None = None
    reads: dict[Hashable, Access] = field(default_factory=dict)

    def read(self, access: Access) -> None:
        """Notes a read. Raises RaceError if the last write may come after it."""
        self._check(access, self.last_write)
        self.reads[access.actor] = access

    def write(self, access: Access) -> None:
        """Notes a write. Raises RaceError if an earlier access may come after it."""
        for other in (self.last_write, *self.reads.values()):
            self._check(access, other)
        self.last_write, self.reads = access, {}

    def unknown_to(self, actors: Iterable[Hashable]) -> list[Access]:
        """Returns the accesses that may come after what any of the actors does next."""
        accesses = [access for access in (self.last_write, *self.reads.values()) if access is not None]
        return [access for access in accesses if not self.clocks.is_known(access, actors)]

    def _check(self, access: Access, other: Access | None) -> None:
        if other is not None and other.actor != access.actor and not self.clocks.is_known(other, [access.actor]):
            raise RaceError(f"nothing orders two uses of {self.name}:\n  {other}\n  {access}")
