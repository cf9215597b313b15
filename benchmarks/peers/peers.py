"""Who is timed: Stretto's kernels and everything that a user could call in their place.

Each peer turns a `Case` into candidates, of which the fastest is kept, or says why it cannot. The
peers from PyTorch run in a process of their own: see `torch_peers.py`. Peers that have something
for some operations only keep a table of them, by record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case, call_of
from stretto.benchmarks.cases.meshes import AXIS, joined
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.peers import attention, expert_peers, torch_peers
from stretto.distributed import settings
from stretto.kernels.engine.architectures import TILES
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operation import Operand, Operation
from stretto.kernels.operations import OPERATIONS, matmuls
from stretto.kernels.problem.machine import HOPPER, Machine
from stretto.kernels.problem.scales import FP8

FUSED = "fused"
XLA = "xla"
MATMUL = "matmul"
COMMUNICATION = "communication"
OTHER = "other"
ROLES = (FUSED, XLA, MATMUL, COMMUNICATION, OTHER)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Peer:
    """One implementation to time.

    Attributes:
      name, label: as options and results name it, and as people do.
      role: what its time means: `FUSED` ours, `XLA` the one to beat, `MATMUL` and `COMMUNICATION`
        the parts that make the floor, `OTHER` another library's.
      candidates: raises `UnavailableError`; None where the times come from the PyTorch helper.
      by_xla: whether XLA generates the code, and may time variants on the device as it compiles.
      on_request: whether it is timed only where it is named.
      serves: the operations that it has; None for all.
      trace_s: seconds that tracing its candidates takes, about.
      is_compared: whether its result is compared with XLA's, though it is not Stretto's.
    """

    name: str
    label: str
    role: str
    candidates: Callable[[Case, Mesh], list[Candidate]] | None
    by_xla: bool = True
    on_request: bool = False
    serves: Collection[Operation] | None = None
    trace_s: float = 0.05
    is_compared: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether its result is held to XLA's."""
        return self.is_compared or self.role == FUSED

    def has(self, operation: Operation) -> bool:
        """Whether it serves an operation."""
        return self.serves is None or operation in self.serves

    def candidates_for(self, case: Case, mesh: Mesh) -> list[Candidate]:
        """What it offers for a case.

        Raises:
          UnavailableError: nothing, and why.
        """
        if not self.has(case.operation):
            raise UnavailableError(f"{self.label} has no such operation")
        if self.candidates is None:
            raise UnavailableError("it runs in a helper process")
        return self.candidates(case, mesh)


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


# Of each operand and of the result, the dimension that is cut.
WINDOWED: dict[Operation, tuple[tuple[int, int], int]] = {
    matmuls.GATHERS["m"]: ((0, 1), 1),
    matmuls.MATMUL_REDUCE_SCATTER: ((1, 0), 0),
}


def _windowed(case: Case, mesh: Mesh) -> list[Candidate]:
    """XLA's own overlap: its partitioner splits matmul and collective into ring steps."""
    joins, out_joins = WINDOWED[case.operation]
    if case.devices == 1:
        raise UnavailableError("one device has nothing to overlap")

    def body(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(lhs @ rhs, NamedSharding(mesh, joined(mesh, out_joins)))

    options = {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": True,
    }
    return [
        Candidate(
            body=body,
            operands=case.operands,
            joins=joins,
            out_joins=out_joins,
            manual=False,
            compiler_options=options,
        )
    ]


def _factors(case: Case) -> tuple[Operand, Operand]:
    """The operands of the matmul inside: on one device, with what was gathered."""
    if case.work.product is None:
        raise UnavailableError("there is no matmul in it")
    m, k, n = case.work.product
    groups = case.work.matrices
    rows = (groups, -(-m // groups)) if groups > 1 else (m,)
    of_groups = (groups,) if groups > 1 else ()
    if case.operation.examples.scales is not None:
        lhs = Operand(shape=(*rows, k), dtype=FP8[0])
        return lhs, Operand(shape=(*of_groups, n, k), dtype=FP8[0])
    return Operand(shape=(*rows, k)), Operand(shape=(*of_groups, k, n))


def _matmul_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    """One product; of rows for several matrices a product of each, of as many rows."""
    if case.operation.examples.scales is not None:
        return [Candidate(body=_product_in_8_bits, operands=_factors(case))]

    def body(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32).astype(lhs.dtype)

    return [Candidate(body=body, operands=_factors(case))]


def _product_in_8_bits(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """cuBLAS's, with fast accumulation and one scale of 1; rhs is transposed."""
    *batch, _, k = range(lhs.ndim)
    product = lax.dot_general(
        lhs, rhs, (((k,), (k,)), (batch, batch)), preferred_element_type=jnp.float32
    )
    return product.astype(jnp.bfloat16)


def _architecture_of(mesh: Mesh) -> str:
    """ "sm_90" or the like; "" of devices that are no GPUs."""
    device = mesh.devices.flat[0]
    machine = Machine.of_kind(device.platform, device.device_kind)
    return machine.architecture if machine.platform == "gpu" else ""


def _own_matmul_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    tiles = TILES.get(_architecture_of(mesh))
    if tiles is None:
        raise UnavailableError("it needs GPUs of compute capability 9.0 or 10.0")
    if case.operation.examples.scales is not None:
        raise UnavailableError("it is timed without scales")
    factors = _factors(case)
    if case.work.matrices > 1:
        raise UnavailableError("it has one matrix for all rows")
    return [
        Candidate(
            body=functools.partial(local_matmul, config=config),
            operands=factors,
            config=str(config),
        )
        for config in (
            dataclasses.replace(tiles.large, raster_width=8),
            dataclasses.replace(tiles.large, raster_width=16),
            *tiles.large_ones[1:],
            tiles.narrow,
        )
    ]


def _communication_alone(case: Case, mesh: Mesh) -> list[Candidate]:
    traffic = case.work.traffic
    if traffic is None or case.devices == 1:
        raise UnavailableError("one device sends nothing")
    body = call_of(OPERATIONS[traffic.collective], "xla", axes=mesh.axis_names)
    return [Candidate(body=body, operands=(Operand(shape=traffic.shape),))]


def _all_gather_matmul_of_jax() -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

    return collective_matmul_mgpu.all_gather_lhs_matmul


# Imported when asked for: they need a package that JAX does not.
JAX_PALLAS: dict[Operation, Callable[[], Callable[..., jax.Array]]] = {
    matmuls.GATHERS["m"]: _all_gather_matmul_of_jax
}


def _jax_pallas(case: Case, mesh: Mesh) -> list[Candidate]:
    """JAX's own collective matmul for Hopper, in four of the configurations that its makers sweep.

    Each takes a second to trace; the best of all that were tried at first had this raster width.
    """
    if _architecture_of(mesh) != HOPPER:
        raise UnavailableError("it needs GPUs of compute capability 9.0")
    if case.devices == 1 or case.devices != jax.device_count():
        raise UnavailableError(f"it runs on all {jax.device_count()} devices only, and on several")
    try:
        kernel = JAX_PALLAS[case.operation]()
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper
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
        found.append(Candidate(body=body, operands=case.operands, config=name))
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
        Peer(name="xla", label="XLA", role=XLA, candidates=_public("xla")),
        Peer(
            name="xla-windowed",
            label="XLA windowed",
            role=OTHER,
            candidates=_windowed,
            serves=WINDOWED,
        ),
        Peer(name="matmul", label="matmul alone", role=MATMUL, candidates=_matmul_alone),
        Peer(
            name="own-matmul",
            label="own matmul",
            role=MATMUL,
            candidates=_own_matmul_alone,
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
            candidates=_communication_alone,
        ),
        Peer(
            name="jax-pallas",
            label="JAX Pallas",
            role=OTHER,
            candidates=_jax_pallas,
            by_xla=False,
            serves=JAX_PALLAS,
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


def applies(peer: Peer, case: Case) -> bool:
    """Whether `peer` means anything for `case`.

    A plain collective has no parts to time alone, and one device's operation only a matmul.
    """
    if peer.role == MATMUL:
        return case.work.product is not None if peer.serves is None else peer.has(case.operation)
    if peer.role == COMMUNICATION:
        return bool(case.work.flops) and case.work.traffic is not None
    return True
