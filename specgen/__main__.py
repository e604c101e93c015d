"""`python -m specgen`."""

from specgen.cli.app import main

if __name__ == "__main__":
    main()
