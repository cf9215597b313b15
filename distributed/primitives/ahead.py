"""A kernel that was lowered for CPU devices, as a program of its own for absent GPUs.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config
from jax._src import mesh as mesh_lib
from jax._src.pallas import mpmd
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.distributed.primitives import team_kernel
from stretto.distributed.primitives.cpu_kernels import LoweredKernel
from stretto.distributed.primitives.team_kernel import TeamKernelInfo

type Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def alone(kernel: LoweredKernel, mesh: Mesh) -> Program:
    """A function that runs `kernel` on the devices of `mesh`, and its operands.

    Args:
      kernel: as it was lowered.
      mesh: of as many devices along as many axes as those that it was lowered for.
    """

    def call(*operands: Any) -> Any:
        return mpmd.mpmd_map_p.bind(*operands, **kernel.params)

    def body(*operands: Any) -> Any:
        # What is in the kernel is typed for the mesh that it was traced for, of CPU devices.
        with mesh_lib.use_abstract_mesh(kernel.abstract_mesh):
            if not kernel.in_clique:
                return call(*operands)
            info = TeamKernelInfo(name=kernel.name, axes=mesh.axis_names, reverse=kernel.reverse)
            with team_kernel.tracing():
                traced = jax.make_jaxpr(call)(*kernel.in_avals)
            return team_kernel.team_kernel_p.bind(*operands, jaxpr=traced, info=info)

    whole = NamedSharding(mesh, P())
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in kernel.in_avals]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return mapped, structs


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Errors that JAX raises inside it keep the frames of JAX's own."""
    with config.traceback_filtering("off"):
        yield
