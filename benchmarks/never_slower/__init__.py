"""Whether `backend="auto"` is anywhere slower, at sizes that are drawn at random."""
