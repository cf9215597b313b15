"""The fused matmuls, one file a kernel."""
