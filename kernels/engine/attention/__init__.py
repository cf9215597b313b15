"""Attention by parts: which keys a tile of queries sees, in which order, and from where."""
