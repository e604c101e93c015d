"""Tensor parallelism: several processes, started by torchrun, each hold a part of every weight and run each pass together."""
