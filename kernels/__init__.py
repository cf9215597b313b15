"""Collectives and fused matmuls: one file a kernel, and what they share."""
