"""The command line: the modules of the commands (generate, compare, inspect, tune) and modules that
several commands use."""
