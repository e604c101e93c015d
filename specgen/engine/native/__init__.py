"""A decoder of our own for the common model families: it reads config.json and safetensors files
without transformers."""
