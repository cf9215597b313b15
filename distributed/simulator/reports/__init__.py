"""What the simulator has to say: findings, their lines, traces and numbers."""
