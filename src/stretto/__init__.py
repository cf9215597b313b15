"""Multi-GPU kernels for JAX that overlap communication with arithmetic."""
