"""Which devices a kernel runs on: axes of a mesh, how GPUs are linked, and who belongs together."""
