"""What XLA's own operations compute."""
