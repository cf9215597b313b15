"""The peers over several nodes: Stretto, XLA's flat and hierarchical versions, the matmul alone.

All run inside `shard_map` over the axes `NODE` and `GPU`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import GPU, NODE
from stretto.benchmarks.peers.peer import FUSED, OTHER, Peer
from stretto.benchmarks.peers.peers import PEERS
from stretto.kernels.operation import Operation
from stretto.kernels.operations import collectives, matmuls
from stretto.kernels.problem import node_config
from stretto.kernels.xla.matmul import matmul


def peers_across_nodes(backend: str, pieces: Sequence[int]) -> list[Peer]:
    """XLA's versions first, then Stretto's, on `backend`, once for each number of pieces."""
    hierarchical = Peer(
        name="xla-hierarchical",
        label="XLA hierarchical",
        role=OTHER,
        candidates=_hierarchical,
        serves=HIERARCHICAL,
        is_compared=True,
    )
    ours = (
        Peer(
            name=f"fused-{count}",
            label=f"Stretto, {count} pieces",
            role=FUSED,
            candidates=functools.partial(_ours, backend=backend, pieces=count),
            by_xla=False,
        )
        for count in (pieces if backend != "xla" else (1,))  # XLA's moves in one.
    )
    flat = dataclasses.replace(PEERS["xla"], label="XLA flat")
    return [flat, hierarchical, PEERS["matmul"], *ours]


def _ours(case: Case, mesh: Mesh, *, backend: str, pieces: int) -> list[Candidate]:
    config = None if backend == "xla" else node_config.Config(pieces=pieces)
    body = case.call(backend, config, axes=mesh.axis_names)
    return [Candidate(body=body, operands=case.operands, config=f"{pieces} pieces")]


def _hierarchical(case: Case, mesh: Mesh) -> list[Candidate]:
    return [Candidate(body=HIERARCHICAL[case.operation], operands=case.operands)]


def _matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return matmul(lhs, rhs).astype(lhs.dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    """Between nodes first, which carries each byte once, and then within them."""
    across = lax.all_gather(x, NODE)
    within = lax.all_gather(across, GPU)
    return jnp.swapaxes(within, 0, 1).reshape(-1, x.shape[1])


def _reduce_scatter(x: jax.Array) -> jax.Array:
    """Within nodes first, so that a node's sum crosses."""
    shares = x.reshape(lax.axis_size(NODE), lax.axis_size(GPU), -1, x.shape[1])
    within = collectives.reduce_scatter(shares, GPU, axis=1)
    return collectives.reduce_scatter(within, NODE, axis=0)[0, 0]


def _all_reduce(x: jax.Array) -> jax.Array:
    within = collectives.reduce_scatter(x, GPU, axis=0)
    return lax.all_gather(lax.psum(within, NODE), GPU, tiled=True)


def _all_gather_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _matmul(_all_gather(lhs), rhs)


def _matmul_reduce_scatter(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _reduce_scatter(_matmul(lhs, rhs))


def _matmul_all_reduce(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _all_reduce(_matmul(lhs, rhs))


HIERARCHICAL: dict[Operation, Callable[..., jax.Array]] = {
    collectives.ALL_GATHER: _all_gather,
    collectives.REDUCE_SCATTER: _reduce_scatter,
    collectives.ALL_REDUCE: _all_reduce,
    matmuls.GATHERS["m"]: _all_gather_matmul,
    matmuls.MATMUL_REDUCE_SCATTER: _matmul_reduce_scatter,
    matmuls.MATMUL_ALL_REDUCE: _matmul_all_reduce,
}
