"""`python -m specgen.workers DESCRIPTOR PARENT MEMORY`: a draft worker, started by `specgen.workers.process`."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Serve until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from specgen.workers.worker_loop import serve

    descriptor, parent, memory = map(int, sys.argv[1:])
    serve(Connection(descriptor), parent, memory)


if __name__ == "__main__":
    main()
