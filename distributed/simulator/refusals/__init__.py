"""What is looked at before a kernel runs: what no GPU or no simulator can do."""
