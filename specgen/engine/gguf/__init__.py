"""Models in GGUF files, the format of llama.cpp: header, tensors and their quantised types."""
