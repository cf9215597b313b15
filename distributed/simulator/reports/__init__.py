"""The simulator's output: findings, their lines, traces and numbers."""
