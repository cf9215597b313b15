"""Training steps on many GPUs: models, splits, memory, times, plans."""
