"""Runs models by transformers' own code: the backend for families that the native decoder does not
know, and the reference."""
