"""Who is timed: Stretto's kernels and everything that a user could call in their place.

Each peer turns a `Case` into candidates, of which the fastest is kept, or says why it cannot. The
peers from PyTorch run in a process of their own: see `torch_peers.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.operations import AXIS, Case
from stretto.benchmarks.programs import COLUMNS, ROWS, Candidate
from stretto.distributed import settings
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused.local_matmul import local_matmul

FUSED = "fused"
XLA = "xla"
MATMUL = "matmul"
COMMUNICATION = "communication"
OTHER = "other"
ROLES = (FUSED, XLA, MATMUL, COMMUNICATION, OTHER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One implementation to time.

    `role` says what its time means: `FUSED` ours, `XLA` the one to beat, `MATMUL` and
    `COMMUNICATION` the parts that make the floor, `OTHER` another library's. `candidates` raises
    `UnavailableError`; None where the times come from the PyTorch helper. `by_xla` says that XLA
    generates the code, and may time variants on the device as it compiles. One `on_request` is
    timed only where it is named.
    """

    name: str
    label: str
    role: str
    candidates: Callable[[Case, Mesh], list[Candidate]] | None
    by_xla: bool = True
    on_request: bool = False


def _public(backend: str) -> Callable[[Case, Mesh], list[Candidate]]:
    def candidates(case: Case, mesh: Mesh) -> list[Candidate]:
        return [Candidate(body=case.operation.public(backend), blocks=case.blocks)]

    return candidates


def _without_limit(case: Case, mesh: Mesh) -> list[Candidate]:
    """The fused kernel whose waits spin for ever: what their limit costs is the difference."""
    call = case.operation.public("pallas")

    def body(*operands: jax.Array) -> jax.Array:
        with settings.wait_limit(0):
            return call(*operands)

    return [Candidate(body=body, blocks=case.blocks, config="waits without limit")]


def _unfused(case: Case, mesh: Mesh) -> list[Candidate]:
    return [Candidate(body=case.operation.unfused, blocks=case.blocks)]


def _windowed(case: Case, mesh: Mesh) -> list[Candidate]:
    """XLA's own overlap: its partitioner splits matmul and collective into ring steps."""
    if case.operation.name == "all_gather_matmul":
        specs, out_spec = (ROWS, COLUMNS), COLUMNS
    elif case.operation.name == "matmul_reduce_scatter":
        specs, out_spec = (COLUMNS, ROWS), ROWS
    else:
        raise UnavailableError("XLA splits only matmuls with an all-gather or a reduce-scatter")
    if case.devices == 1:
        raise UnavailableError("one device has nothing to overlap")

    def body(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(lhs @ rhs, NamedSharding(mesh, out_spec))

    options = {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": True,
    }
    return [
        Candidate(
            body=body,
            blocks=case.blocks,
            specs=specs,
            out_spec=out_spec,
            manual=False,
            compiler_options=options,
        )
    ]


def _matmul_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    if case.operation.product_blocks is None:
        raise UnavailableError("there is no matmul in it")

    def body(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32).astype(lhs.dtype)

    return [Candidate(body=body, blocks=case.operation.product_blocks(case.shape, case.devices))]


def _own_matmul_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    if case.operation.product_blocks is None:
        raise UnavailableError("there is no matmul in it")
    if mesh.devices.flat[0].platform == "cpu":
        raise UnavailableError("it needs GPUs of compute capability 9.0")
    blocks = case.operation.product_blocks(case.shape, case.devices)
    return [
        Candidate(
            body=functools.partial(local_matmul, config=config), blocks=blocks, config=str(config)
        )
        for config in (
            TileConfig(raster_width=8),
            TileConfig(raster_width=16),
            TileConfig(tile_n=128, num_stages=5, store_buffers=2),
        )
    ]


def _communication_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    if case.devices == 1:
        raise UnavailableError("one device sends nothing")
    block = case.operation.moved_block(case.shape, case.devices)
    return [Candidate(body=case.operation.communicate, blocks=(block,))]


def _jax_pallas(case: Case, mesh: Mesh) -> list[Candidate]:
    """JAX's own collective matmul for Hopper, in four of the configurations that its makers sweep.

    Each takes a second to trace; the best of all that were tried at first had this raster width.
    """
    if case.operation.name != "all_gather_matmul":
        raise UnavailableError("JAX has no such kernel")
    if mesh.devices.flat[0].platform == "cpu":
        raise UnavailableError("it needs GPUs of compute capability 9.0")
    if case.devices == 1 or case.devices != jax.device_count():
        raise UnavailableError(f"it runs on all {jax.device_count()} devices only, and on several")
    try:
        kernel = importlib.import_module(
            "jax.experimental.pallas.ops.gpu.collective_matmul_mgpu"
        ).all_gather_lhs_matmul
        hopper = importlib.import_module("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    except ImportError as error:
        raise UnavailableError(f"it needs a package that is missing ({error})") from None
    dimensions = (hopper.MatmulDimension.M, hopper.MatmulDimension.N)
    found = []
    for wide, minor in itertools.product(dimensions, dimensions):
        config = hopper.TuningConfig(
            tile_m=128,
            tile_n=128,
            tile_k=64,
            max_concurrent_steps=4,
            grid_minor_dim=minor,
            grid_tile_width=16,
            wg_dimension=wide,
        )

        def body(lhs: jax.Array, rhs: jax.Array, config=config) -> jax.Array:
            return kernel(lhs, rhs, AXIS, config=config, dtype=lhs.dtype)

        name = f"128x128x64 x4 wg={wide.name} minor={minor.name} width=16"
        found.append(Candidate(body=body, blocks=case.blocks, config=name))
    return found


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
        Peer(name="xla", label="XLA", role=XLA, candidates=_unfused),
        Peer(name="xla-windowed", label="XLA windowed", role=OTHER, candidates=_windowed),
        Peer(name="matmul", label="matmul alone", role=MATMUL, candidates=_matmul_alone),
        Peer(
            name="own-matmul",
            label="own matmul",
            role=MATMUL,
            candidates=_own_matmul_alone,
            by_xla=False,
        ),
        Peer(
            name="communication",
            label="NCCL alone",
            role=COMMUNICATION,
            candidates=_communication_alone,
        ),
        Peer(
            name="jax-pallas", label="JAX Pallas", role=OTHER, candidates=_jax_pallas, by_xla=False
        ),
        Peer(name="torch", label="torch", role=OTHER, candidates=None),
        Peer(name="torch-symm", label="torch symm. memory", role=OTHER, candidates=None),
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


def applies(peer: Peer, case: Case) -> bool:
    """Whether `peer` means anything for `case`: a plain collective has no parts to time alone."""
    return case.operation.product_blocks is not None or peer.role not in (MATMUL, COMMUNICATION)
