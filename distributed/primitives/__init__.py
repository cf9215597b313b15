"""Stretto's JAX primitives, of which kernels are made. They need private JAX."""
