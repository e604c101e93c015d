"""The command line: the modules of the commands (generate, compare, inspect, tune, serve) and
modules that several commands use."""
