"""The main loop of matmuls on Hopper GPUs."""
