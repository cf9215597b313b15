"""Checks before a kernel runs: operations that no GPU or not the simulator can run."""
