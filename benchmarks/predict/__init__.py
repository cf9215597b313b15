"""The model of time, and predicted timelines."""
