"""For those who look at kernels: compiling without a GPU, and profiles."""
