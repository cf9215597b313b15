"""Compiles programs, times them in turns, and tunes."""
