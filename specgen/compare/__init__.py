"""Figures out of rounds: traces, summaries, prompts."""
