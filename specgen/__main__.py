"""`python -m specgen`, and the start of the `specgen` command."""

import sys


def start() -> None:
    """Runs the command. Ctrl-C while it is imported ends it without a traceback, as Ctrl-C later
    does."""
    try:
        from specgen.cli.app import program
    except KeyboardInterrupt:
        sys.exit(130)
    program()


if __name__ == "__main__":
    start()
