"""Own kernels for CPUs: products with weights as stored or in 8 or 4 bits, norms, rotary embedding,
attention and activations, in C."""
