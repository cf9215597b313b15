"""The fused matmuls over several nodes: kernels within each, XLA's collectives between them.

Each function takes a `Call` whose `split` has the axes within a node. The public
operation runs it in place of its kernel. Results are
in the order of the whole team: nodes first, then the devices of each.

| operation | crosses between nodes | while a kernel works on |
|---|---|---|
| all-gather matmul | rows of lhs | the own node's rows, then the pieces that have arrived |
| matmul reduce-scatter | a node's sums of another one's rows | the next piece, the own rows last |
| matmul all-reduce | a node's sums, each device's part | the next piece |

Every byte crosses once, and each device sends and gets its own part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax

from stretto.distributed.devices.topology import Split
from stretto.kernels.collectives import arrays
from stretto.kernels.fused import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.nodes import nodes, pipelines
from stretto.kernels.nodes.nodes import Nodes
from stretto.kernels.operation import Call
from stretto.kernels.problem.epilogue import with_arrays

type Pairs = tuple[Sequence[jax.Array], Sequence[jax.Array]]


def all_gather_matmul(operands: Any, call: Call) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`[m_shard, k]` times each of `[k, n_i]` -> `[D * m_shard, n_i]`, as the public operation.

    And the gathered lhs `[D * m_shard, k]` with `call.options.return_gathered`.
    """
    lhs, rhs, _ = with_arrays(operands)
    team, within = _within(call)
    m_shard = lhs.shape[0]
    gathered = pipelines.gather(
        team,
        lhs,
        team.cut(m_shard, nodes.most_pieces(team.devices * m_shard, nodes.LEAST_ROWS, call.pieces)),
        lambda rows: call.kernel.run((rows, rhs), within),
    )

    def whole(*parts: jax.Array) -> jax.Array:
        """One result, joined from the kernels' results for each piece."""
        columns = parts[0].shape[1]
        out = nodes.room_for((team.count, team.devices, m_shard, columns), parts[0])
        for (node, first, _), part in zip(gathered, parts, strict=True):
            part = part.reshape(1, team.devices, -1, columns)
            out = nodes.place(out, part, node, 0, first)
        return out.reshape(-1, columns)

    return jax.tree.map(whole, *(results for _, _, results in gathered))


def matmul_reduce_scatter(operands: Pairs, call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, scattered -> `[m / D, n]`, as the public operation.

    A node's sum is rounded once, to the result's type; the nodes' sums are added in float32.
    """
    lhs, rhs = operands
    team, within = _within(call)
    shards = tuple(x.reshape(team.count, team.devices, -1, x.shape[1]) for x in lhs)
    m_shard = shards[0].shape[2]
    return pipelines.scatter(
        team,
        shards,
        team.cut(m_shard, nodes.most_pieces(team.devices * m_shard, nodes.LEAST_ROWS, call.pieces)),
        lambda rows: matmul_reduce_scatter_kernel.run((rows, rhs), within),
    )


def matmul_all_reduce(operands: Pairs, call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, everywhere -> `[m, n]`, as the public operation.

    A node's sum is rounded once, to the result's type; XLA adds the nodes' sums in that type.
    """
    lhs, rhs = operands
    team, within = _within(call)
    m = lhs[0].shape[0]
    return pipelines.reduce(
        team,
        tuple(lhs),
        nodes.pieces_of(m, nodes.most_pieces(m, nodes.LEAST_ROWS, call.pieces)),
        scatter=lambda rows: matmul_reduce_scatter_kernel.run((rows, rhs), within),
        gather=lambda part: arrays.all_gather_of_sums(
            part, axes=team.inner, interpret=call.interpret
        ),
    )


def _within(call: Call) -> tuple[Nodes, Call]:
    """The nodes that a call spans, and the call of the kernels within each."""
    team = Nodes.of(cast(Split, call.split))
    return team, dataclasses.replace(call, axes=team.inner)
