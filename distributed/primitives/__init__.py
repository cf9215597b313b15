"""JAX primitives of our own, of which kernels are made. They need private JAX."""
