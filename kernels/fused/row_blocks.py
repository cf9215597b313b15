"""Rows in blocks, as of a batch: in the order of the devices, or in that of the blocks.

Of `B` blocks of rows on each of `D` devices a kernel gathers, and scatters, the rows of one device
after those of another. Where a block is made of whole tiles, a kernel finds each of its tiles in
the other order; elsewhere XLA puts the rows in order.

| order | rows | of |
|---|---|---|
| by devices | `[D, B, s]` | what a kernel sends |
| by blocks | `[B, D, s]` | a batch `[B, D * s]` |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def are_whole(rows: int, blocks: int, tile_m: int) -> bool:
    """Whether each of the blocks of a device's `rows` is made of whole tiles."""
    return rows % blocks == 0 and rows // blocks % tile_m == 0


def joined(x: jax.Array, blocks: int, devices: int) -> jax.Array:
    """Rows by devices -> rows by blocks; of an array of one row, itself."""
    return _swapped(x, devices, blocks)


def dealt(x: jax.Array, blocks: int, devices: int) -> jax.Array:
    """Rows by blocks -> rows by devices; of an array of one row, itself."""
    return _swapped(x, blocks, devices)


def _swapped(x: jax.Array, first: int, second: int) -> jax.Array:
    if first == 1 or second == 1 or x.shape[0] == 1:
        return x
    apart = x.reshape(first, second, -1, x.shape[1])
    return jnp.moveaxis(apart, 1, 0).reshape(x.shape)
