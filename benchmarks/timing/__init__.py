"""Compiles what is timed, times it in turns, and tunes."""
