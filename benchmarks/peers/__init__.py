"""Who is timed: Stretto's kernels, XLA and other libraries."""
