"""`python -m specgen.workers PARENT MEMORY`: a draft worker, started by `specgen.workers.process`."""

from __future__ import annotations

import os
import signal
import sys

from specgen.workers.channel import Channel


def main() -> None:
    """Serve until standard input ends. Output of libraries goes to the log (stderr), not into the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, memory = map(int, sys.argv[1:])
    answers = os.dup(1)
    os.dup2(2, 1)
    from specgen.workers.worker_loop import serve

    serve(Channel(0, answers), parent, memory)


if __name__ == "__main__":
    main()
