"""What JAX itself has in the place of a kernel: XLA's windowed einsum, and Pallas's matmul.

Each has something for some operations only, in a table by record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import AXIS, architecture_of, joined
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.operation import Operation
from stretto.kernels.operations import matmuls
from stretto.kernels.problem.machine import HOPPER

# Of each operand and of the result, the dimension that is cut.
WINDOWED: dict[Operation, tuple[tuple[int, int], int]] = {
    matmuls.GATHERS["m"]: ((0, 1), 1),
    matmuls.MATMUL_REDUCE_SCATTER: ((1, 0), 0),
}


def windowed(case: Case, mesh: Mesh) -> list[Candidate]:
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


def _all_gather_matmul_of_jax() -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

    return collective_matmul_mgpu.all_gather_lhs_matmul


# Imported when asked for: they need a package that JAX does not.
JAX_PALLAS: dict[Operation, Callable[[], Callable[..., jax.Array]]] = {
    matmuls.GATHERS["m"]: _all_gather_matmul_of_jax
}


def pallas(case: Case, mesh: Mesh) -> list[Candidate]:
    """JAX's own collective matmul for Hopper, in four of the configurations that its makers sweep.

    Each takes a second to trace; the best of all that were tried at first had this raster width.
    """
    if architecture_of(mesh) != HOPPER:
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
