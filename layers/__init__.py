"""Layers of Flax NNX over the operations; `stretto.flax` has the public ones."""
