"""The fused matmuls over several nodes: kernels within each, XLA's collectives between them.

Each function takes a `gradients.Call` whose `split` says which axes lie within a node, and is what
the public operation runs in place of its kernel. Results lie in the order of the whole team: nodes
first, then the devices of each.

| operation | crosses between nodes | while a kernel works on |
|---|---|---|
| all-gather matmul | rows of lhs | the own node's rows, then the pieces that have come |
| matmul reduce-scatter | a node's sums of another one's rows | the next piece, the own rows last |
| matmul all-reduce | a node's sums, each device's part | the next piece |

Every byte crosses once, and each device sends and gets its own part of them.
"""

from __future__ import annotations

import dataclasses

import jax

from stretto.kernels import fused, nodes, pipelines
from stretto.kernels.gradients import Call
from stretto.kernels.nodes import Nodes


def all_gather_matmul(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m_shard, k] @ [k, n_shard]` -> `[D * m_shard, n_shard]`, as the public operation."""
    team, within = _within(call)
    m_shard, n_shard = lhs.shape[0], rhs.shape[1]
    products = pipelines.gather(
        team,
        lhs,
        team.cut(m_shard, nodes.most_pieces(team.devices * m_shard, nodes.LEAST_ROWS, call.pieces)),
        lambda rows: fused.all_gather_matmul(rows, rhs, within),
    )
    out = nodes.room_for((team.count, team.devices, m_shard, n_shard), products[0][2])
    for node, first, product in products:
        part = product.reshape(1, team.devices, -1, n_shard)
        out = nodes.place(out, part, node, 0, first)
    return out.reshape(-1, n_shard)


def matmul_reduce_scatter(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m, k_shard] @ [k_shard, n]` -> `[m / D, n]`, as the public operation.

    A node's sum is rounded once, to the result's type; the nodes' sums are added in float32.
    """
    team, within = _within(call)
    shards = lhs.reshape(team.count, team.devices, -1, lhs.shape[1])
    m_shard = shards.shape[2]
    return pipelines.scatter(
        team,
        shards,
        team.cut(m_shard, nodes.most_pieces(team.devices * m_shard, nodes.LEAST_ROWS, call.pieces)),
        lambda rows: fused.matmul_reduce_scatter(rows, rhs, within),
    )


def matmul_all_reduce(lhs: jax.Array, rhs: jax.Array, call: Call) -> jax.Array:
    """`[m, k_shard] @ [k_shard, n]` -> `[m, n]`, as the public operation.

    A node's sum is rounded once, to the result's type; XLA adds the nodes' sums in that type.
    """
    team, within = _within(call)
    m = lhs.shape[0]
    return pipelines.reduce(
        team,
        lhs,
        nodes.pieces_of(m, nodes.most_pieces(m, nodes.LEAST_ROWS, call.pieces)),
        scatter=lambda rows: fused.matmul_reduce_scatter(rows, rhs, within),
        gather=lambda part: fused.all_gather_of_sums(
            part, axes=team.inner, interpret=call.interpret
        ),
    )


def _within(call: Call) -> tuple[Nodes, Call]:
    """The nodes that a call spans, and the call of the kernels within each."""
    assert call.split is not None
    team = Nodes.of(call.split)
    return team, dataclasses.replace(call, axes=team.inner)
