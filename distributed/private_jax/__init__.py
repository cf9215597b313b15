"""What is read from JAX and XLA that has no public name, and nothing of Stretto."""
