"""The main loop of Blackwell GPUs."""
