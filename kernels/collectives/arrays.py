"""The collectives' kernels on arrays of any shape and along any axis: laid out in rows, and back.

The public operations call these where a kernel serves them; the hierarchical versions, for the part
within a node; and the matmuls of few rows (`unfused`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.team import Team
from stretto.kernels.collectives import by_heap, exchange, row_layout, summation

type Axes = tuple[Hashable, ...]

# Below it every device of an all-reduce adds all of the array: one exchange in place of two.
ONE_SHOT_BYTES = 256 * 1024


def all_gather(
    x: jax.Array,
    *,
    axes: Axes,
    axis: int,
    config: exchange.Config | by_heap.Config | None = None,
    invariant: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Every device's `x`, joined along `axis`, as the public operation.

    With `invariant` the result is typed as not varying over `axes`.
    """
    team = Team.along(axes)
    config = config or exchange.Config()
    words = row_layout.as_words(x)
    if isinstance(config, by_heap.Config):
        rows = by_heap.all_gather(
            by_heap.to_rows(words, config),
            team,
            config=config,
            invariant=invariant,
            interpret=interpret,
        )
    else:
        rows = row_layout.to_rows(words, 1)
        rows = exchange.all_gather(
            rows, team, config=config, invariant=invariant, interpret=interpret
        )
    parts = row_layout.from_words(row_layout.from_rows(rows, words.shape), x.dtype)
    return joined(parts, axis)


def all_gather_of_sums(x: jax.Array, *, axes: Axes, interpret: Any) -> jax.Array:
    """The parts `x` of a sum, joined along the first axis: typed as the same on every device."""
    return all_gather(x, axes=axes, axis=0, interpret=interpret, invariant=True)


def split(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """`x` with its `axis` cut into `parts`, which come first: `[parts, ..., s, ...]`."""
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def joined(parts: jax.Array, axis: int) -> jax.Array:
    """The inverse of `split`: `[parts, ..., s, ...]` joined along `axis` of a part."""
    shape = list(parts.shape[1:])
    shape[axis] *= parts.shape[0]
    return jnp.moveaxis(parts, 0, axis).reshape(shape)


def reduce_scatter(
    x: jax.Array,
    *,
    axes: Axes,
    axis: int,
    op: str = "sum",
    config: summation.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """This device's part along `axis` of the sum (or by `op`), as the public operation."""
    team = Team.along(axes)
    config = config or summation.Config()
    parts = split(x, axis, team.size)
    rows = summation.reduce_scatter(
        row_layout.to_rows(parts, team.size), team, op=op, config=config, interpret=interpret
    )
    return row_layout.from_rows(rows, parts.shape[1:])[0]


def all_reduce(
    x: jax.Array,
    *,
    axes: Axes,
    op: str = "sum",
    config: summation.Config | by_heap.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The sum of every device's `x` (or by `op`), as the public operation."""
    team = Team.along(axes)
    config = config or summation.Config()
    if isinstance(config, by_heap.Config):
        rows = by_heap.to_rows(x, config)
        rows = by_heap.all_reduce(rows, team, op=op, config=config, interpret=interpret)
        return by_heap.from_rows(rows, x.shape)
    one_shot = x.nbytes <= ONE_SHOT_BYTES
    parts = 1 if one_shot else team.size
    flat_x = x.reshape(-1)
    missing = -flat_x.size % parts
    if missing:
        flat_x = jnp.pad(flat_x, (0, missing))
    rows = summation.all_reduce(
        row_layout.to_rows(flat_x, parts), team, op=op, config=config, interpret=interpret
    )
    return (
        row_layout.from_rows(rows, (flat_x.size // parts,)).reshape(-1)[: x.size].reshape(x.shape)
    )


def all_to_all(
    x: jax.Array,
    *,
    axes: Axes,
    split_axis: int,
    concat_axis: int,
    config: exchange.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Parts of `x` along `split_axis`, exchanged and joined, as the public operation."""
    team = Team.along(axes)
    config = config or exchange.Config()
    words = row_layout.as_words(split(x, split_axis, team.size))
    rows = exchange.all_to_all(
        row_layout.to_rows(words, team.size), team, config=config, interpret=interpret
    )
    parts = row_layout.from_words(row_layout.from_rows(rows, words.shape[1:]), x.dtype)
    return joined(parts, concat_axis)
