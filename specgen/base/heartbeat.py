"""Signs of life: a worker counts, where its parent can read it, as long as it lives; the parent notices when the count stops.

Workers are the draft worker and torchrun's processes, whose parent here is the first of them. A live worker may take minutes for
an answer, so the parent sets no limit on answers. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

INTERVAL = 0.5  # seconds between two beats
LONGEST_SILENCE = 120.0  # seconds; a call into a library that keeps Python's other threads waiting may take long, too
LOOK = 1.0  # seconds between two looks of the parent


def beat_while_parent_lives(beat: Callable[[], object], parent: int) -> None:
    """Calls `beat` regularly, and ends this process when the process with the id `parent` is no longer its parent.

    For a thread of the worker: whatever its main thread does or waits for, the worker ends with its parent.
    """
    while os.getppid() == parent:
        beat()
        time.sleep(INTERVAL)
    os._exit(0)


class SilenceWatch:
    """Notices that a worker has shown no sign of life for too long. The parent has to look about every `LOOK` seconds.

    Time in which the parent itself did not run does not count, as when the machine slept or Ctrl-Z stopped the command: each
    look adds at most two seconds of silence. `beats` returns the worker's count; `clock` returns seconds.
    """

    def __init__(self, beats: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._beats, self._clock = beats, clock
        self._last_beats, self._last_look, self._silence = beats(), clock(), 0.0

    def is_over(self) -> bool:
        """Looks once. Returns whether the silence has lasted `LONGEST_SILENCE` seconds."""
        now, beats = self._clock(), self._beats()
        self._silence = self._silence + min(now - self._last_look, 2 * LOOK) if beats == self._last_beats else 0.0
        self._last_look, self._last_beats = now, beats
        return self._silence >= LONGEST_SILENCE
