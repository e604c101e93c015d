"""`python -m specgen.workers DESCRIPTOR PARENT MEMORY`: a draft worker, started by `specgen.workers.process`.

The arguments are the file descriptor of the connection, the parent's process id and the descriptor of the shared memory.
"""

from __future__ import annotations

import gc
import signal
import sys
from multiprocessing.connection import Connection
from threading import Thread

from specgen.base.heartbeat import beat_while_parent_lives
from specgen.workers.shared_flags import SharedFlags


def main() -> None:
    """Answers requests until the parent process closes the connection or dies. Ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent, memory = map(int, sys.argv[1:])
    flags = SharedFlags(memory)
    Thread(
        target=beat_while_parent_lives, args=(flags.beat, parent), daemon=True
    ).start()  # before the imports, which take seconds
    gc.disable()  # a tenth of the time that the imports take
    from specgen.workers.worker_loop import serve

    gc.freeze()
    gc.enable()
    serve(Connection(descriptor), memory, flags)


if __name__ == "__main__":
    main()
