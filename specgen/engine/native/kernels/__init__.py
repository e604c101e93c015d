"""What static passes compute besides matrix products: by torch's operators, or by fused Triton kernels where these work."""
