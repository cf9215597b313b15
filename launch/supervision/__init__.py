"""What watches a job that runs: an agent on each host, the supervisor, and what failures mean."""
