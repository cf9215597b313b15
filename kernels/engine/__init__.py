"""What fused kernels are made of."""
