"""Who is timed: our kernels, XLA and other libraries."""
