"""The fused matmuls on operands of any size and shape: padded to what the hardware takes, and cut.

The public operations call these where a kernel serves them; the hierarchical versions, for the part
within a node.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.team import Team
from stretto.kernels.engine import padding
from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.fused import all_gather_matmul_k as all_gather_matmul_k_kernel
from stretto.kernels.fused import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.fused import unfused as apart
from stretto.kernels.operations.gradients import Call


def all_gather_matmul(
    lhs: jax.Array, rhs: Sequence[jax.Array], call: Call
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`[m_shard, k]` times each of `[k, n_i]` -> `[D * m_shard, n_i]`, as the public operation.

    And the gathered lhs `[D * m_shard, k]` where `call.gathered` asks for it.
    """
    if call.config.apart:
        return apart.all_gather_matmul(lhs, rhs, call)
    team = Team.along(call.axes)
    m_shard, k = lhs.shape
    results = all_gather_matmul_kernel.launch(
        padding.pad(lhs, padding.ROWS, padding.COLUMNS),
        [padding.pad(x, padding.COLUMNS, padding.COLUMNS) for x in rhs],
        team,
        epilogue=call.epilogue,
        out_dtype=call.out_dtype,
        config=call.config,
        rhs_transposed=call.rhs_transposed,
        return_gathered=call.gathered,
        interpret=call.interpret,
    )
    columns = [x.shape[0 if call.rhs_transposed else 1] for x in rhs] + [k] * call.gathered
    cut = [
        x[:, :m_shard, :n].reshape(team.size * m_shard, n)
        for x, n in zip(results, columns, strict=True)
    ]
    return tuple(cut[: len(rhs)]), cut[-1] if call.gathered else None


# The caller has transposed the problem.
all_gather_matmul_n = all_gather_matmul


def all_gather_matmul_k(
    lhs: jax.Array, rhs: Sequence[jax.Array], call: Call
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`[m, k_shard]` times each of `[D * k_shard, n_i]` -> `[m, n_i]`, as the public operation.

    And the gathered lhs `[m, D * k_shard]` where `call.gathered` asks for it.
    """
    team = Team.along(call.axes)
    m, k_shard = lhs.shape
    k_axis, n_axis = (1, 0) if call.rhs_transposed else (0, 1)

    def padded_rhs(x):
        x = padding.pad_parts(x, k_axis, team.size, padding.COLUMNS)
        return padding.pad(x, padding.COLUMNS, padding.COLUMNS)

    results = all_gather_matmul_k_kernel.launch(
        padding.pad(lhs, padding.ROWS, padding.COLUMNS),
        [padded_rhs(x) for x in rhs],
        team,
        epilogue=call.epilogue,
        out_dtype=call.out_dtype,
        config=call.config,
        rhs_transposed=call.rhs_transposed,
        return_gathered=call.gathered,
        interpret=call.interpret,
    )
    outs = tuple(
        out[:m, : x.shape[n_axis]] for out, x in zip(results[: len(rhs)], rhs, strict=True)
    )
    if not call.gathered:
        return outs, None
    return outs, results[-1][:m, :, :k_shard].reshape(m, team.size * k_shard)


def matmul_reduce_scatter(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], call: Call
) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, scattered -> `[m / D, n]`, as the public operation.

    Where m is no multiple of D, the last devices' rows are of padding: `[ceil(m / D), n]`.
    """
    if call.config.apart:
        return apart.matmul_reduce_scatter(lhs, rhs, call)
    return _scattered(lhs, rhs, call, matmul_reduce_scatter_kernel.launch)[0]


def matmul_all_reduce(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, everywhere -> `[m, n]`, as the public operation."""
    if call.config.apart:
        return apart.matmul_all_reduce(lhs, rhs, call)
    out = _scattered(lhs, rhs, call, matmul_all_reduce_kernel.launch)
    return out.reshape(-1, out.shape[2])[: lhs[0].shape[0]]


def _scattered(lhs, rhs, call, launch) -> jax.Array:
    """A kernel that scatters rows.

    The rows are dealt out in equal shards, the last ones of padding where they do not divide.
    Returns `[shards, m_shard, n]`, the shards that this device holds.
    """
    team = Team.along(call.axes)
    m, n = lhs[0].shape[0], rhs[0].shape[0 if call.rhs_transposed else 1]
    m_shard = schedule.ceil_div(m, team.size)

    def shards(x):
        if missing := team.size * m_shard - m:
            x = jnp.pad(x, ((0, missing), (0, 0)))
        x = x.reshape(team.size, m_shard, x.shape[1])
        return padding.pad(x, padding.ROWS, padding.COLUMNS)

    out = launch(
        [shards(x) for x in lhs],
        [padding.pad(x, padding.COLUMNS, padding.COLUMNS) for x in rhs],
        team,
        out_dtype=call.out_dtype,
        config=call.config,
        rhs_transposed=call.rhs_transposed,
        interpret=call.interpret,
    )
    return out[:, :m_shard, :n]
