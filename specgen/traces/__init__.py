"""Trace files, which record generations as JSON lines: writing, reading, summaries and
statistics."""
