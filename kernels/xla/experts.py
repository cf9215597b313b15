"""Tokens to their experts and back, through XLA's collectives, on any platform.

Dispatch gathers all tokens, and each device selects those of its experts: with as many choices
as devices nearly every token is wanted everywhere. Combine sums on the experts' devices what each
token gets there, exchanges the sums, and adds them up in the order of the devices. `positions` is
that of `routing.Routing`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import axis_size, make_varying, varying_axes
from stretto.kernels.problem.routing import NONE
from stretto.kernels.xla import collectives


def dispatch(x: jax.Array, positions: jax.Array, axes: tuple, *, rows: int) -> jax.Array:
    """`[tokens, d]` -> `[rows, d]`, those of this device's experts; zero where there are none."""
    if 0 in positions.shape:  # Nothing is chosen, and there may be no row to take.
        return make_varying(jnp.zeros((rows, x.shape[1]), x.dtype), varying_axes(x))
    own = _own_rows(positions, axes)
    places = jnp.where(own == NONE, rows, own).reshape(-1)
    tokens = jnp.arange(own.shape[0] * own.shape[1], dtype=jnp.int32) // own.shape[1]
    token = jnp.full(rows, own.shape[0], jnp.int32).at[places].set(tokens, mode="drop")
    return _gathered(x, axes).at[token].get(mode="fill", fill_value=0)


def combine(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    axes: tuple,
    *,
    wire_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """`[rows, d]`, `[tokens, top_k]` -> `[tokens, d]` in the type of the rows.

    The sum over a token's entries on one device is rounded to `wire_dtype`.
    """
    devices = axis_size(axes)
    tokens, top_k = positions.shape
    if 0 in positions.shape or 0 in rows.shape:
        return make_varying(jnp.zeros((tokens, rows.shape[1]), rows.dtype), varying_axes(rows))
    own = _own_rows(positions, axes)
    weights = _gathered(weights.astype(jnp.float32), axes)
    total = jnp.zeros((devices * tokens, rows.shape[1]), jnp.float32)
    for j in range(top_k):
        here = (own[:, j] != NONE)[:, None]
        row = rows[jnp.maximum(own[:, j], 0)].astype(jnp.float32)
        total += jnp.where(here, weights[:, j, None] * row, 0)
    sums = total.astype(wire_dtype)
    if devices > 1:
        sums = collectives.all_to_all(sums, axes, split_axis=0, concat_axis=0)
    parts = sums.reshape(devices, tokens, rows.shape[1])
    out = parts[0].astype(jnp.float32)
    for device in range(1, devices):
        out += parts[device].astype(jnp.float32)
    return out.astype(rows.dtype)


def sources_of_rows(positions: jax.Array, axes: tuple, *, rows: int) -> jax.Array:
    """Where each row of this device is from, int32 `[rows]`: `token * D + device`.

    The device is counted from this one, along the ring. Rows of no token have 0.
    """
    devices = axis_size(axes)
    tokens, top_k = positions.shape
    own = _own_rows(positions, axes)
    places = jnp.where(own == NONE, rows, own).reshape(-1)
    token = jnp.arange(devices * tokens * top_k, dtype=jnp.int32) // top_k
    device = token // tokens
    me = lax.axis_index(axes) if devices > 1 else 0
    source = (token - device * tokens) * devices + (device - me) % devices
    return jnp.zeros(rows, jnp.int32).at[places].set(source, mode="drop")


def numbers_of_rows(
    numbers: jax.Array, positions: jax.Array, axes: tuple, *, rows: int
) -> tuple[jax.Array, jax.Array]:
    """A number of each entry, `[tokens, top_k]` -> of each row, float32 `[rows]`, and where.

    Zero for rows that belong to no token, for which the second result is false.
    """
    own = _own_rows(positions, axes).reshape(-1)
    places = jnp.where(own == NONE, rows, own)
    values = _gathered(numbers.astype(jnp.float32), axes).reshape(-1)
    found = jnp.zeros(rows, jnp.float32).at[places].set(values, mode="drop")
    return found, jnp.zeros(rows, jnp.bool_).at[places].set(True, mode="drop")


def numbers_of_entries(numbers: jax.Array, positions: jax.Array, axes: tuple) -> jax.Array:
    """A number of each row, `[rows]` -> of each entry, float32 `[tokens, top_k]`; zero for none."""
    devices = axis_size(axes)
    rows = numbers.shape[0]
    if rows == 0:
        return make_varying(jnp.zeros(positions.shape, jnp.float32), varying_axes(positions))
    everywhere = _gathered(numbers.astype(jnp.float32), axes)
    place = positions % devices * rows + positions // devices
    return jnp.where(positions == NONE, 0, everywhere[jnp.where(positions == NONE, 0, place)])


def _own_rows(positions: jax.Array, axes: tuple) -> jax.Array:
    """For the entries of all devices the row on this one, int32 `[D * tokens, top_k]`, or -1."""
    devices = axis_size(axes)
    if devices == 1:
        return positions
    everyone = _gathered(positions, axes)
    here = (everyone != NONE) & (everyone % devices == lax.axis_index(axes))
    return jnp.where(here, everyone // devices, NONE)


def _gathered(x: jax.Array, axes: tuple) -> jax.Array:
    return x if axis_size(axes) == 1 else collectives.all_gather(x, axes, axis=0)
