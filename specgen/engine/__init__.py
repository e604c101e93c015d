"""Models and their tokenizers: loading, sessions, caches, masks."""
