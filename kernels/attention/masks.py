"""Which keys a query sees: by position in the sequence, and by document."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

PADDING = -1
"""The position of padding, which belongs to no sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of all queries.

    Attributes:
      causal: a query sees no later key.
      window: the most keys that a query sees, itself and those right before it; None for all.
    """

    causal: bool = False
    window: int | None = None


class Tokens(NamedTuple):
    """The facts of tokens that a mask depends on.

    Attributes:
      positions: int32 `[tokens]`, in the whole sequence; `PADDING` for padding.
      segments: int32 `[batch, tokens]`, the document of each token; None for a single document.
    """

    positions: jax.Array
    segments: jax.Array | None = None


def visible(mask: Mask, queries: Tokens, keys: Tokens) -> jax.Array:
    """bool `[1 or batch, queries, keys]`: whether the query sees the key."""
    q, k = queries.positions[:, None], keys.positions[None, :]
    seen = (q != PADDING) & (k != PADDING)
    if mask.causal:
        seen &= k <= q
    if mask.window is not None:
        seen &= q - k < mask.window
    seen = seen[None]
    if queries.segments is not None and keys.segments is not None:
        seen &= queries.segments[:, :, None] == keys.segments[:, None, :]
    return seen


def may_see(mask: Mask, queries: Tokens, keys: Tokens) -> jax.Array:
    """bool: False only where no query sees any key, by the ends of their ranges."""
    q_last = jnp.max(queries.positions)
    q_first = jnp.min(jnp.where(queries.positions == PADDING, q_last, queries.positions))
    k_last = jnp.max(keys.positions)
    k_first = jnp.min(jnp.where(keys.positions == PADDING, k_last, keys.positions))
    seen = (q_last != PADDING) & (k_last != PADDING)
    if mask.causal:
        seen &= k_first <= q_last
    if mask.window is not None:
        seen &= q_first - k_last < mask.window
    if queries.segments is not None and keys.segments is not None:
        seen &= jnp.min(queries.segments) <= jnp.max(keys.segments)
        seen &= jnp.min(keys.segments) <= jnp.max(queries.segments)
    return seen
