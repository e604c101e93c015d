"""`python -m specgen`."""

from specgen.cli.app import program

if __name__ == "__main__":
    program()
