"""Which row of which device each token goes to, from the experts that it chose: tables for all.

An entry is one choice of one token. Entries of one expert from one device are a group;
within it they keep the order of tokens, and of a token's choices. A device's rows are ordered by
expert, and within an expert device by device, in the order of the team. Only counts cross between
devices: `num_experts + 1` numbers of each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.problem.routing import NONE, Routing
from stretto.kernels.xla import collectives


def route(expert_index: jax.Array, axes: tuple, *, num_experts: int, rows: int) -> Routing:
    """`[tokens, top_k]` experts, and `rows` that each device has room for -> the tables.

    `num_experts` must be a multiple of the devices, and entries x (experts + 1) below 2^32.
    """
    devices = axis_size(axes)
    me = lax.axis_index(axes) if devices > 1 else jnp.int32(0)
    experts = expert_index.astype(jnp.int32).reshape(-1)
    is_one = (experts >= 0) & (experts < num_experts)
    strays = jnp.sum(~is_one & (experts != NONE), dtype=jnp.int32)
    experts = jnp.where(is_one, experts, num_experts)
    ranks, own_counts = ranks_in_groups(experts, num_experts)
    told = jnp.concatenate([own_counts, strays[None]])
    told = told[None] if devices == 1 else collectives.all_gather(told[None], axes, axis=0)
    counts = told[:, :num_experts]
    kept = _kept(counts, devices, rows)
    starts = _starts(kept, devices)
    expert = jnp.minimum(experts, num_experts - 1)
    row = starts[me][expert] + ranks
    fits = is_one & (ranks < kept[me][expert])
    device = expert // (num_experts // devices)
    positions = jnp.where(fits, row * devices + device, NONE).reshape(expert_index.shape)
    return Routing(
        positions=positions,
        group_sizes=jnp.sum(kept, axis=0, dtype=jnp.int32).reshape(devices, -1)[me],
        tokens_per_expert=jnp.sum(counts, axis=0, dtype=jnp.int32),
        dropped=jnp.sum(counts - kept, dtype=jnp.int32),
        out_of_range=jnp.sum(told[:, num_experts], dtype=jnp.int32),
    )


def ranks_in_groups(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The place of each entry among those of its expert, int32 `[n]`, and counts `[num_experts]`.

    One sort of one array of keys, which hold expert and entry: it needs no stable sort, and XLA
    has a radix sort for it on GPUs. Entries of no expert have `num_experts`.
    """
    count = experts.shape[0]
    entry = jnp.arange(count, dtype=jnp.uint32)
    keys = lax.sort(experts.astype(jnp.uint32) * jnp.uint32(count) + entry, is_stable=False)
    order = (keys % jnp.uint32(count)).astype(jnp.int32)
    groups = (keys // jnp.uint32(count)).astype(jnp.int32)
    which = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(experts[:, None] == which, axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = jnp.concatenate([ends - counts, ends[-1:]])
    ranks = jnp.arange(count, dtype=jnp.int32) - starts[groups]
    return jnp.zeros_like(ranks).at[order].set(ranks, unique_indices=True), counts


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


def _starts(kept: jax.Array, devices: int) -> jax.Array:
    """The first row of each group on the device of its expert, int32 `[devices, num_experts]`."""
    groups = kept.reshape(devices, devices, -1).transpose(1, 2, 0).reshape(devices, -1)
    starts = jnp.cumsum(groups, axis=1, dtype=jnp.int32) - groups
    return starts.reshape(devices, -1, devices).transpose(2, 0, 1).reshape(kept.shape)
