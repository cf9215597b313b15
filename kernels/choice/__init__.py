"""Which implementation serves a call, and why."""
