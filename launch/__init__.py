"""Command line, process start, supervision and the doctor."""
