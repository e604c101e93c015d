"""Tuning: measures a pair of target and draft model on this machine, and finds its fastest method
and settings."""
