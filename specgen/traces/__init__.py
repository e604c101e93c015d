"""Trace files: writing, reading, summaries and statistics."""
