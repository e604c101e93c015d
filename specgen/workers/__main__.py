"""`python -m specgen.workers DESCRIPTOR PARENT MEMORY`: a draft worker, started by
`specgen.workers.process`.

The arguments are the file descriptor of the connection, the parent's process id and the descriptor
of the shared memory.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from threading import Thread


def main() -> None:
    """Answers requests until the parent process closes the connection or dies. Ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent, memory = map(int, sys.argv[1:])
    # before the imports, which take seconds
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.disable()  # a tenth of the time that the imports take
    from specgen.workers.server import serve

    gc.freeze()
    gc.enable()
    serve(Connection(descriptor), memory)


def _end_with(parent: int) -> None:
    """Ends this process with its parent, whatever its main thread does. Another child may hold the
    connection open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
