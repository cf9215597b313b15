"""Which row of which device each token goes to, from the experts that it chose: tables for all.

An entry is one choice of one token. Entries of one expert from one device are a group;
within it they keep the order of tokens, and of a token's choices. A device's rows are ordered by
expert, and within an expert device by device, in the order of the team.

All is comparisons and sums: XLA makes fewer and shorter kernels of these than of a sort and a
scatter. Of few entries all cross between devices, and each is compared with all. Of many only
counts cross, `num_experts + 1` numbers of each device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.problem import checks
from stretto.kernels.problem.routing import NONE, Routing
from stretto.kernels.xla import collectives

BLOCK = 256
"""Entries that are compared with each other, where there are many."""
MOST_COMPARISONS = 2**22
"""Of few entries with all devices': some microseconds, less than the kernels that they replace."""


def route(expert_index: jax.Array, axes: tuple, *, num_experts: int, rows: int) -> Routing:
    """`[tokens, top_k]` experts, and `rows` that each device has room for -> the tables.

    `num_experts` must be a multiple of the devices.
    """
    devices = axis_size(axes)
    me = lax.axis_index(axes) if devices > 1 else jnp.int32(0)
    entries = as_int32(expert_index, num_experts).reshape(-1)
    fit = not checks.is_symbolic(expert_index) and rows >= devices * entries.size
    if fit and devices * entries.size**2 <= MOST_COMPARISONS:
        return _of_few(entries, expert_index.shape, axes, num_experts, devices, me)
    classes = _classes(entries, num_experts)
    ranks, own_counts = ranks_in_groups(classes, num_experts + 1)
    told = _gathered(own_counts[None], axes)
    counts = told[:, :num_experts]
    kept = counts if fit else _kept(counts, devices, rows)
    expert = jnp.clip(classes, 0, num_experts - 1)
    row = _starts(kept, devices, me)[expert] + ranks
    fits = _is_one(classes, num_experts)
    if not fit:
        fits &= ranks < kept[me][expert]
    own = num_experts // devices
    return Routing(
        positions=_positions(row, fits, _device_of(expert, own), devices).reshape(
            expert_index.shape
        ),
        group_sizes=jnp.sum(
            lax.dynamic_slice_in_dim(kept, me * own, own, axis=1), axis=0, dtype=jnp.int32
        ),
        tokens_per_expert=jnp.sum(counts, axis=0, dtype=jnp.int32),
        dropped=jnp.int32(0) if fit else jnp.sum(counts - kept, dtype=jnp.int32),
        out_of_range=jnp.sum(told[:, num_experts], dtype=jnp.int32),
    )


def _of_few(
    entries: jax.Array, shape: tuple, axes: tuple, num_experts: int, devices: int, me: jax.Array
) -> Routing:
    """The tables where all entries fit: a row is the number of entries that come before it."""
    everyones = _gathered(entries, axes)
    number = jnp.arange(everyones.size, dtype=jnp.int32)
    own = num_experts // devices
    this = me * entries.size + jnp.arange(entries.size, dtype=jnp.int32)[:, None]
    expert = entries[:, None]
    device = _device_of(expert, own)
    before = (everyones < expert) | ((everyones == expert) & (number < this))
    row = jnp.sum((everyones >= device * own) & before, axis=1, dtype=jnp.int32)
    is_one = _is_one(entries, num_experts)
    which = jnp.arange(num_experts, dtype=jnp.int32)
    return Routing(
        positions=_positions(row, is_one, device[:, 0], devices).reshape(shape),
        group_sizes=_counts(everyones, me * own + which[:own]),
        tokens_per_expert=_counts(everyones, which),
        dropped=jnp.int32(0),
        out_of_range=jnp.sum(
            ~_is_one(everyones, num_experts) & (everyones != NONE), dtype=jnp.int32
        ),
    )


def as_int32(expert_index: jax.Array, num_experts: int) -> jax.Array:
    """The choices in int32; those that it cannot hold are out of range there, too."""
    kind = jnp.iinfo(expert_index.dtype)
    if kind.max > jnp.iinfo(jnp.int32).max:
        valid = expert_index < num_experts
        if kind.min < 0:
            valid &= expert_index >= NONE
        expert_index = jnp.where(valid, expert_index, num_experts)
    return expert_index.astype(jnp.int32)


def _device_of(expert: jax.Array, own: int) -> jax.Array:
    """The device that has an expert, of `own` each; int32 where numbers have 64 bits, too."""
    return lax.div(expert, jnp.int32(own))


def _gathered(x: jax.Array, axes: tuple) -> jax.Array:
    return x if axis_size(axes) == 1 else collectives.all_gather(x, axes, axis=0)


def _is_one(entries: jax.Array, num_experts: int) -> jax.Array:
    return (entries >= 0) & (entries < num_experts)


def _counts(entries: jax.Array, which: jax.Array) -> jax.Array:
    return jnp.sum(entries == which[:, None], axis=1, dtype=jnp.int32)


def _positions(row: jax.Array, goes: jax.Array, device: jax.Array, devices: int) -> jax.Array:
    return jnp.where(goes, row * devices + device, NONE)


def _classes(entries: jax.Array, num_experts: int) -> jax.Array:
    """The same where it is an expert or none; out of range `num_experts`."""
    known = (entries < num_experts) & (entries >= NONE)
    return jnp.where(known, entries, num_experts)


def ranks_in_groups(classes: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """The place of each entry among those of its class, int32 `[n]`, and counts `[number]`.

    Of an entry that has no class, -1, the place means nothing. Entries are compared with those of
    their block; blocks are counted.
    """
    count = classes.shape[0]
    number_of_blocks = -(-count // BLOCK)
    filled = number_of_blocks * BLOCK - count
    blocks = jnp.pad(classes, (0, filled), constant_values=NONE).reshape(number_of_blocks, BLOCK)
    entry = jnp.arange(BLOCK, dtype=jnp.int32)
    alike = blocks[:, :, None] == blocks[:, None, :]
    within = jnp.sum(alike & (entry < entry[:, None]), axis=2, dtype=jnp.int32)
    which = jnp.arange(number, dtype=jnp.int32)
    counts = jnp.sum(blocks[:, None, :] == which[:, None], axis=2, dtype=jnp.int32)
    before = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    ranks = jnp.take_along_axis(before, jnp.maximum(blocks, 0), axis=1) + within
    return ranks.reshape(-1)[:count], jnp.sum(counts, axis=0, dtype=jnp.int32)


def _kept(counts: jax.Array, devices: int, rows: int) -> jax.Array:
    """How many entries of each group fit, int32 `[devices, num_experts]` as `counts`.

    Groups of one device of experts are cut off at one limit, the largest at which they fit
    together. What room that leaves goes to the first groups that are longer, one row to each: by
    expert, and by device that they come from.
    """
    own = counts.reshape(devices, devices, -1)  # From, to, expert.
    groups = own.transpose(1, 2, 0).reshape(devices, -1)
    kept = jax.vmap(lambda sizes: _fit(sizes, rows))(groups)
    return kept.reshape(devices, -1, devices).transpose(2, 0, 1).reshape(counts.shape)


def _fit(sizes: jax.Array, rows: int) -> jax.Array:
    """Sizes of groups, cut off so that they sum to `rows` at most."""
    ascending = jnp.sort(sizes)
    number = jnp.arange(len(sizes), dtype=jnp.int32)
    before = jnp.cumsum(ascending, dtype=jnp.int32) - ascending
    # With the smaller groups whole, the others share what is left. That share grows from group to
    # group as long as these fit, and shrinks afterwards.
    limit = jnp.max((rows - before) // (len(sizes) - number))
    cut = jnp.minimum(sizes, limit)
    longer = sizes > cut
    left = rows - jnp.sum(cut, dtype=jnp.int32)
    return cut + (longer & (jnp.cumsum(longer, dtype=jnp.int32) <= left))


def _starts(kept: jax.Array, devices: int, me: jax.Array) -> jax.Array:
    """The first row of this device's groups on the devices of their experts, `[num_experts]`."""
    num_experts = kept.shape[1]
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    sender = jnp.arange(devices, dtype=jnp.int32)[:, None]
    this = expert[:, None, None]
    own = num_experts // devices
    before = (expert < this) | ((expert == this) & (sender < me))
    before &= _device_of(expert, own) == _device_of(this, own)
    return jnp.sum(jnp.where(before, kept, 0), axis=(1, 2), dtype=jnp.int32)
