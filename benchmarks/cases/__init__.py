"""What is timed: an operation at a size, and how long it must take at least."""
