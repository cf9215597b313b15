"""Online softmax of one warpgroup's scores, in float32, with exponents to the base 2.

Milakov and Gimelshein, arXiv:1805.02867; Dao, FlashAttention-2, arXiv:2307.08691.

Weights are relative to a reference of each row, an exponent that was the row's highest one when it
was taken. As long as weights stay moderate it is kept: nothing is scaled, and no maximum is taken.
Their sum tells: where it is above `MOST`, the highest exponent becomes the reference, and what was
folded is scaled. Any reference gives the same quotient of sums in the end.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.primitives.device_code import any_above, settled
from stretto.distributed.schedule import Int

LOWEST = float(jnp.finfo(jnp.float32).min)
"""In place of minus infinity, of which no difference can be taken."""
MOST = 2.0**10
"""Of a thread's weights in a block: float16 has them without overflow."""
COLUMNS = 8
"""Columns of a result that lie in the same registers of a thread again."""


class Folded(NamedTuple):
    """Attention to the keys that were seen so far.

    Attributes:
      out: `[rows, dim]`, the sum of weighted values.
      reference: `[rows]`, an exponent.
      total: `[rows, COLUMNS]`, sums of weights, `2 ** (exponent - reference)`, that make up a
        row's together.
    """

    out: jax.Array
    reference: jax.Array
    total: jax.Array


def nothing(rows: int, dim: int) -> Folded:
    """Of no keys."""
    zeros = lambda columns: plgpu.layout_cast(  # noqa: E731
        jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA
    )
    lowest = jnp.full((rows,), LOWEST, jnp.float32)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return Folded(zeros(dim), plgpu.layout_cast(lowest, by_row), zeros(COLUMNS))


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
    scores: jax.Array, folded: Folded, exponent: float, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, Folded]:
    """(weights of the scores, of this type; what was folded, on their scale, with their sum)."""
    weights, total = _weights(scores, folded.reference, exponent)
    # The assembler would leave half of this to the wait for the turn, while the tensor cores idle.
    rounded = settled(weights.astype(dtype))
    return lax.cond(
        any_above(total, MOST),
        lambda: _with_highest(scores, folded, exponent, dtype),
        lambda: (rounded, folded._replace(total=folded.total + total)),
    )


def _with_highest(
    scores: jax.Array, folded: Folded, exponent: float, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, Folded]:
    """`weighed`, with each row's highest exponent so far as its reference."""
    highest = jnp.maximum(folded.reference, jnp.max(scores, 1) * exponent)
    kept = jnp.exp2(folded.reference - highest)
    weights, total = _weights(scores, highest, exponent)
    total += scaled(folded.total, kept)
    return weights.astype(dtype), Folded(scaled(folded.out, kept), highest, total)


def _weights(
    scores: jax.Array, reference: jax.Array, exponent: float
) -> tuple[jax.Array, jax.Array]:
    """(weights, their sums as `Folded.total`)."""
    weights = jnp.exp2(scores * exponent - _over(reference, scores))
    groups = [weights[:, at : at + COLUMNS] for at in range(0, weights.shape[1], COLUMNS)]
    return weights, functools.reduce(jnp.add, groups)


def scaled(x: jax.Array, by_row: jax.Array) -> jax.Array:
    """`x`, each row times its number."""
    return x * _over(by_row, x)


def _over(by_row: jax.Array, x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(by_row, x.shape, (0,))


def finished(folded: Folded) -> tuple[jax.Array, jax.Array]:
    """(attention, its logsumexp to the base e); 0 and minus infinity of a row without keys."""
    total = jnp.sum(folded.total, 1)
    none = total == 0  # NaN is of a row that has keys.
    total = jnp.where(none, 1.0, total)
    lse = jnp.where(none, -jnp.inf, (folded.reference + jnp.log2(total)) * math.log(2))
    return scaled(folded.out, 1.0 / total), lse
