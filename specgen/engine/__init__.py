"""Models and their tokenizers: loading, running with a KV cache, early exit and layer skipping."""
