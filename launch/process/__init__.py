"""Code that runs in the user's processes: their launcher, their job, and their progress."""
