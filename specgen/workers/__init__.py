"""Runs the draft model at the same time as the target: in a separate process, in a thread, or while a GPU is busy."""
