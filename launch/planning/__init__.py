"""What a job is before it starts: its hosts, their GPUs, its processes and their addresses."""
