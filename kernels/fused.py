"""The fused kernels on operands of any size and shape: padded to what the hardware takes, and cut.

The public operations call these where a kernel serves them; the hierarchical versions, for the part
within a node.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.team import Team
from stretto.kernels import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels import exchange, flat, moving, padding, summation
from stretto.kernels import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.gradients import Call

type Axes = tuple[Hashable, ...]


def all_gather_matmul(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m_shard, k] @ [k, n_shard]` -> `[D * m_shard, n_shard]`, as the public operation."""
    team = Team.along(call.axes)
    m_shard, n_shard = lhs.shape[0], rhs.shape[1]
    out = all_gather_matmul_kernel.launch(
        padding.pad(lhs, padding.ROWS, padding.COLUMNS),
        padding.pad(rhs, padding.COLUMNS, padding.COLUMNS),
        team,
        epilogue=call.epilogue,
        out_dtype=call.out_dtype,
        config=call.config,
        interpret=call.interpret,
    )
    out = out[:, :m_shard, :n_shard]
    return out.reshape(team.size * m_shard, n_shard)


def matmul_reduce_scatter(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m, k_shard] @ [k_shard, n]` -> `[m / D, n]`, as the public operation.

    Where m is no multiple of D, the last devices' rows are of padding: `[ceil(m / D), n]`.
    """
    return _scattered(lhs, rhs, call, matmul_reduce_scatter_kernel.launch)[0]


def matmul_all_reduce(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m, k_shard] @ [k_shard, n]` -> `[m, n]`, as the public operation."""
    out = _scattered(lhs, rhs, call, matmul_all_reduce_kernel.launch)
    return out.reshape(-1, rhs.shape[1])[: lhs.shape[0]]


def _scattered(lhs, rhs, call, launch) -> jax.Array:
    """A kernel that scatters rows.

    The rows are dealt out in equal shards, the last ones of padding where they do not divide.
    Returns `[shards, m_shard, n]`, the shards that this device holds.
    """
    team = Team.along(call.axes)
    m_shard, n = schedule.ceil_div(lhs.shape[0], team.size), rhs.shape[1]
    missing = team.size * m_shard - lhs.shape[0]
    if missing:
        lhs = jnp.pad(lhs, ((0, missing), (0, 0)))
    shards = lhs.reshape(team.size, m_shard, lhs.shape[1])
    out = launch(
        padding.pad(shards, padding.ROWS, padding.COLUMNS),
        padding.pad(rhs, padding.COLUMNS, padding.COLUMNS),
        team,
        out_dtype=call.out_dtype,
        config=call.config,
        interpret=call.interpret,
    )
    return out[:, :m_shard, :n]


def all_gather(
    x: jax.Array,
    *,
    axes: Axes,
    axis: int,
    config: exchange.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Every device's `x`, joined along `axis`, as the public operation."""
    team = Team.along(axes)
    config = config or exchange.Config()
    words = flat.as_words(x)
    rows = exchange.all_gather(flat.to_rows(words, 1), team, config=config, interpret=interpret)
    parts = flat.from_words(flat.from_rows(rows, words.shape), x.dtype)
    return jnp.moveaxis(parts, 0, axis).reshape(
        *x.shape[:axis], team.size * x.shape[axis], *x.shape[axis + 1 :]
    )


def _split(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """`x` with its `axis` cut into `parts`, which come first: `[parts, ..., s, ...]`."""
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def reduce_scatter(
    x: jax.Array,
    *,
    axes: Axes,
    axis: int,
    config: summation.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """This device's part along `axis` of the sum, as the public operation."""
    team = Team.along(axes)
    config = config or summation.Config()
    parts = _split(x, axis, team.size)
    rows = summation.reduce_scatter(
        flat.to_rows(parts, team.size), team, config=config, interpret=interpret
    )
    return flat.from_rows(rows, parts.shape[1:])[0]


def all_reduce(
    x: jax.Array,
    *,
    axes: Axes,
    config: summation.Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The sum of every device's `x`, as the public operation."""
    team = Team.along(axes)
    config = config or summation.Config()
    one_shot = x.nbytes <= moving.ONE_SHOT_BYTES
    parts = 1 if one_shot else team.size
    flat_x = x.reshape(-1)
    missing = -flat_x.size % parts
    if missing:
        flat_x = jnp.pad(flat_x, (0, missing))
    rows = summation.all_reduce(
        flat.to_rows(flat_x, parts), team, config=config, interpret=interpret
    )
    return flat.from_rows(rows, (flat_x.size // parts,)).reshape(-1)[: x.size].reshape(x.shape)


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
    words = flat.as_words(_split(x, split_axis, team.size))
    rows = exchange.all_to_all(
        flat.to_rows(words, team.size), team, config=config, interpret=interpret
    )
    parts = flat.from_words(flat.from_rows(rows, words.shape[1:]), x.dtype)
    shape = list(parts.shape[1:])
    shape[concat_axis] *= team.size
    return jnp.moveaxis(parts, 0, concat_axis).reshape(shape)
