"""Loads models and their tokenizers, and runs models with a KV cache, also with early exit or layer
skipping."""
