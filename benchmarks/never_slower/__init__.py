"""Whether `backend="auto"` is anywhere slower, at sizes that nobody chose."""
