"""Who is timed: Stretto's kernels and everything that a user could call in their place.

Each peer turns a `Case` into candidates, of which the fastest is kept, or says why it cannot. The
peers from PyTorch run in a process of their own: see `torch_peers.py`. Peers that have something
for some operations only keep a table of them, by record.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.peers import attention, expert_peers, jax_peers, parts_alone, torch_peers
from stretto.benchmarks.peers.peer import COMMUNICATION, FUSED, MATMUL, OTHER, XLA, Peer
from stretto.distributed import settings


def _public(backend: str) -> Callable[[Case, Mesh], list[Candidate]]:
    def candidates(case: Case, mesh: Mesh) -> list[Candidate]:
        return [Candidate(body=case.call(backend, axes=mesh.axis_names), operands=case.operands)]

    return candidates


def _without_limit(case: Case, mesh: Mesh) -> list[Candidate]:
    """The fused kernel with unlimited waits, to measure the cost of the limit."""
    call = case.call("pallas", axes=mesh.axis_names)

    def body(*operands: jax.Array) -> jax.Array:
        with settings.wait_limit(0):
            return call(*operands)

    return [Candidate(body=body, operands=case.operands, config="waits without limit")]


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="fused", label="Stretto", role=FUSED, candidates=_public("pallas"), by_xla=False),
        Peer(
            name="fused-no-limit",
            label="Stretto, waits without limit",
            role=OTHER,
            candidates=_without_limit,
            by_xla=False,
            on_request=True,
        ),
        Peer(name="auto", label="Stretto auto", role=FUSED, candidates=_public("auto")),
        Peer(name="xla", label="XLA", role=XLA, candidates=_public("xla")),
        Peer(
            name="xla-windowed",
            label="XLA windowed",
            role=OTHER,
            candidates=jax_peers.windowed,
            serves=jax_peers.WINDOWED,
        ),
        Peer(name="matmul", label="matmul alone", role=MATMUL, candidates=parts_alone.matmul),
        Peer(
            name="own-matmul",
            label="own matmul",
            role=MATMUL,
            candidates=parts_alone.own_matmul,
            by_xla=False,
            trace_s=1.0,
        ),
        Peer(
            name="attention",
            label="attention alone",
            role=MATMUL,
            candidates=attention.alone,
            serves=(attention.ATTENTION,),
        ),
        Peer(
            name="attention-fused",
            label="Stretto, keys pulled under attention",
            role=OTHER,
            candidates=attention.fused,
            by_xla=False,
            on_request=True,
            serves=(attention.ATTENTION,),
            trace_s=3.0,
            is_compared=True,
        ),
        Peer(
            name="own-attention",
            label="own attention",
            role=OTHER,
            candidates=attention.own,
            by_xla=False,
            on_request=True,
            serves=(attention.ATTENTION,),
            trace_s=3.0,
        ),
        Peer(
            name="xla-contiguous",
            label="XLA, contiguous",
            role=OTHER,
            candidates=attention.contiguous,
            serves=(attention.ATTENTION,),
        ),
        Peer(
            name="ring",
            label="ring of ppermute",
            role=OTHER,
            candidates=attention.ring,
            serves=(attention.ATTENTION,),
            is_compared=True,
        ),
        Peer(
            name="communication",
            label="NCCL alone",
            role=COMMUNICATION,
            candidates=parts_alone.communication,
        ),
        Peer(
            name="jax-pallas",
            label="JAX Pallas",
            role=OTHER,
            candidates=jax_peers.pallas,
            by_xla=False,
            serves=jax_peers.JAX_PALLAS,
            trace_s=4.0,
        ),
        Peer(
            name="xla-ragged",
            label="XLA ragged",
            role=OTHER,
            candidates=expert_peers.ragged,
            serves=expert_peers.RAGGED,
        ),
        Peer(name="torch", label="torch", role=OTHER, candidates=None, serves=torch_peers.SERVED),
        Peer(
            name="torch-symm",
            label="torch symm. memory",
            role=OTHER,
            candidates=None,
            serves=torch_peers.SERVED,
        ),
    )
}


def peers_named(names: tuple[str, ...]) -> list[Peer]:
    """The peers called `names`; if empty, all that need not be asked for. ValueError if unknown."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"peer {unknown[0]!r} is not one of {', '.join(PEERS)}.")
    if not names:
        return [peer for peer in PEERS.values() if not peer.on_request]
    return [PEERS[name] for name in names]
