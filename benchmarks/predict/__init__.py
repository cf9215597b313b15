"""The model of time, and timelines that nobody measured."""
