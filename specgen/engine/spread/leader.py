"""Announces on rank 0 what the other ranks have to run with it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.interrupts import interrupts
from specgen.engine.spread.messages import Operation, send
from specgen.engine.spread.ranks import LostRankError, Ranks

_HINT = "torchrun's own report says which process ended, and how"


class Leader:
    """Rank 0's side of a group of ranks.

    `reported` returns what another rank said about its failure, None if none did. `failure` is why the ranks are no longer in
    step, after which nothing can be run any more. `in_call` is true while all ranks run something together.
    """

    CLOSED = "it was closed"

    def __init__(self, ranks: Ranks, reported: Callable[[], str | None] = lambda: None) -> None:
        self.ranks, self._reported = ranks, reported
        self.failure: str | None = None
        self.in_call = False
        self._last_key = 0
        self._dropped: deque[int] = deque()  # filled by destructors, which may run at any time and in any thread

    def new_key(self, owner: object) -> int:
        """Returns a number for `owner`'s counterpart on the other ranks. These drop it when `owner` is freed."""
        self._last_key += 1
        weakref.finalize(owner, self._dropped.append, self._last_key)
        return self._last_key

    @contextmanager
    def call(self, operation: Operation, numbers: Sequence[int], *, holds: bool = True) -> Iterator[None]:
        """Announces an operation; the block must run rank 0's part of it.

        A Ctrl-C is delayed to the block's end if `holds`. If the block raises, the ranks are no longer in step: all later calls
        raise RunError, as does the block if another rank has ended.
        """
        self.check()
        with interrupts.held() if holds else nullcontext():
            self.in_call = True
            try:
                if self._dropped:
                    send(self.ranks, Operation.DROP, [self._dropped.popleft() for _ in range(len(self._dropped))])
                send(self.ranks, operation, numbers)
                yield
            except LostRankError as error:
                self.fail()
                raise self.error() from error
            except BaseException as error:
                self.failure = self.failure or ("out of memory" if is_out_of_memory(error) else "it was interrupted")
                raise
            finally:
                self.in_call = False

    def check(self) -> None:
        """Raises RunError if the ranks are no longer in step."""
        if self.failure is not None:
            raise self.error()

    def fail(self, why: str | None = None) -> None:
        """Notes that the ranks are no longer in step: what another rank reported, else `why`."""
        self.failure = self.failure or self._reported() or why or "another of torchrun's processes has ended"

    def error(self) -> SpecgenError:
        return RunError(f"the run on {self.ranks.size} processes has ended: {self.failure}", _HINT)

    def end(self) -> None:
        """Tells the other ranks to end."""
        if self.failure is None and not self.in_call:
            self.failure = self.CLOSED
            with suppress(LostRankError):  # they have ended already
                send(self.ranks, Operation.END, ())
