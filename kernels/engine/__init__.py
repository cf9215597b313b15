"""The building blocks of fused kernels."""
