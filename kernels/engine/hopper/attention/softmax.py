"""Online softmax of one warpgroup's scores, in float32, with exponents to the base 2.

Milakov and Gimelshein, arXiv:1805.02867; Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int

LOWEST = float(jnp.finfo(jnp.float32).min)
"""In place of minus infinity, of which no difference can be taken."""


class Folded(NamedTuple):
    """Attention to the keys that were seen so far.

    Attributes:
      out: `[rows, dim]`, the sum of weighted values.
      highest: `[rows]`, the highest exponent.
      total: `[rows]`, the sum of weights, `2 ** (exponent - highest)`.
    """

    out: jax.Array
    highest: jax.Array
    total: jax.Array


def nothing(rows: int, dim: int) -> Folded:
    """Of no keys."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return Folded(
        plgpu.layout_cast(jnp.zeros((rows, dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
    )


def masked(scores: jax.Array, ahead: Int, window: int | None) -> jax.Array:
    """Minus infinity where a key is behind its query, or not among the `window` keys up to it.

    The first query is `ahead` places behind the first key in the sequence.
    """
    columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    # Limits by row take two registers of a thread; distances of all pairs would take 64.
    last = plgpu.broadcasted_iota(jnp.int32, scores.shape[:1], 0, layout=by_row) + ahead
    # So would columns: a thread has 32 of them, and two within a group of 8.
    within, before = columns & 7, columns & ~7
    seen = within <= lax.broadcast_in_dim(last, scores.shape, (0,)) - before
    if window is not None:
        seen &= within > lax.broadcast_in_dim(last - window, scores.shape, (0,)) - before
    return jnp.where(seen, scores, -jnp.inf)


def weighed(
    scores: jax.Array, folded: Folded, exponent: float
) -> tuple[jax.Array, jax.Array, Folded]:
    """(weights of the scores, what `out` is to be scaled by, what was folded with their sum)."""
    highest = jnp.maximum(folded.highest, jnp.max(scores, 1) * exponent)
    kept = jnp.exp2(folded.highest - highest)
    weights = jnp.exp2(scores * exponent - lax.broadcast_in_dim(highest, scores.shape, (0,)))
    total = folded.total * kept + jnp.sum(weights, 1)
    return weights, kept, folded._replace(highest=highest, total=total)


def scaled(out: jax.Array, kept: jax.Array) -> jax.Array:
    """`out`, each row times `kept`."""
    return out * lax.broadcast_in_dim(kept, out.shape, (0,))


def finished(folded: Folded) -> tuple[jax.Array, jax.Array]:
    """(attention, its logsumexp to the base e); 0 and minus infinity of a row without keys."""
    some = folded.total > 0
    total = jnp.where(some, folded.total, 1.0)
    lse = jnp.where(some, (folded.highest + jnp.log2(total)) * math.log(2), -jnp.inf)
    inverse = 1.0 / total
    return folded.out * lax.broadcast_in_dim(inverse, folded.out.shape, (0,)), lse
