"""The chunks of a device's tokens as entries of the batch, without a copy."""

from __future__ import annotations

import jax


def folded(x: jax.Array, chunks: int) -> jax.Array:
    """`[batch, tokens, ...]` -> `[batch * chunks, tokens / chunks, ...]`."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch * chunks, tokens // chunks, *rest)


def unfolded(x: jax.Array, chunks: int) -> jax.Array:
    """The inverse of `folded`."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch // chunks, tokens * chunks, *rest)


def folded_rows(x: jax.Array, chunks: int) -> jax.Array:
    """`[batch, heads, tokens]` -> `[batch * chunks, heads, tokens / chunks]`."""
    batch, heads, tokens = x.shape
    x = x.reshape(batch, heads, chunks, tokens // chunks).transpose(0, 2, 1, 3)
    return x.reshape(batch * chunks, heads, tokens // chunks)


def unfolded_rows(x: jax.Array, chunks: int) -> jax.Array:
    """The inverse of `folded_rows`."""
    batch, heads, tokens = x.shape
    x = x.reshape(batch // chunks, chunks, heads, tokens).transpose(0, 2, 1, 3)
    return x.reshape(batch // chunks, heads, chunks * tokens)
