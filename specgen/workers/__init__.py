"""Runs the draft model beside the target: in a process of its own, or in a thread with a CUDA stream of its own."""
