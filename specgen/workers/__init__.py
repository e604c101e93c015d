"""Runs the draft model at the same time as the target: in a separate process, or in a thread with its own CUDA stream."""
