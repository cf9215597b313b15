"""Data files: tuned tables, cluster files, sweep files, machines, models."""
