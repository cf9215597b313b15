"""What runs in a process of the user's: who started it, whom it joins, and its signs of life."""
