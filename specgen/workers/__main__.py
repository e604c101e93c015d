"""`python -m specgen.workers DESCRIPTOR PARENT MEMORY`: a draft worker, started by `specgen.workers.process`.

The arguments are the file descriptor of the connection, the parent's process id and the descriptor of the shared memory.
"""

from __future__ import annotations

import gc
import signal
import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Answers requests until the parent process closes the connection or dies. Ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a tenth of the time that the imports take
    from specgen.workers.worker_loop import serve

    gc.freeze()
    gc.enable()
    descriptor, parent, memory = map(int, sys.argv[1:])
    serve(Connection(descriptor), parent, memory)


if __name__ == "__main__":
    main()
