"""Times and timelines that nobody measured."""
