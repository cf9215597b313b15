"""Shares, attention to some of the keys, and their merge to attention to all keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Share(NamedTuple):
    """Attention to some keys.

    Attributes:
      out: `[batch, queries, heads, dim]`; undefined where `lse` is minus infinity.
      lse: the logsumexp of these keys' scores, `[batch, heads, queries]`, float32 or wider.
    """

    out: jax.Array
    lse: jax.Array


def counted(share: Share, keys: jax.Array) -> Share:
    """The share, without effect if `keys`, a number at run time, is 0."""
    return Share(share.out, jnp.where(keys > 0, share.lse, -jnp.inf))


def merged(shares: Sequence[Share], dtype: Any) -> Share:
    """Attention to the keys of all shares, in `dtype`: one pass, in float32 or wider.

    A share in 16 bits is rounded once more than attention to all keys in one call. A query without
    keys in any share gets 0, and a logsumexp of minus infinity.
    """
    lse = functools.reduce(jnp.logaddexp, (share.lse for share in shares))
    base = jnp.where(lse == -jnp.inf, 0, lse)

    weights = [jnp.exp(share.lse - base).transpose(0, 2, 1)[..., None] for share in shares]
    # Without the barrier XLA transposes after the comparison, in one kernel for each share.
    weights = jax.lax.optimization_barrier(weights)
    terms = [
        jnp.where(weight == 0, 0, weight * share.out.astype(lse.dtype))
        for weight, share in zip(weights, shares, strict=True)
    ]
    return Share(sum_of(terms).astype(dtype), lse)


def joined(shares: Sequence[Share]) -> Share:
    """The shares of all chunks of queries, joined."""
    if len(shares) == 1:
        return shares[0]
    outs, lses = zip(*shares, strict=True)
    return Share(jnp.concatenate(outs, 1), jnp.concatenate(lses, 2))


def sum_of(terms: Sequence[jax.Array], wide: Any = None) -> jax.Array:
    """Their sum, in `wide` if given."""
    given = [x if wide is None else x.astype(wide) for x in terms]
    return functools.reduce(jnp.add, given)
