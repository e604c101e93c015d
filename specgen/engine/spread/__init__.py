"""Models on several devices: tensor parallelism (torchrun's processes each hold a part of every
weight), and layers on GPUs and CPU."""
