"""The kernels of the collectives."""
