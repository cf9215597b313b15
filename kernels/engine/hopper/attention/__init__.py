"""The main loop of attention on Hopper GPUs."""
