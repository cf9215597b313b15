"""A kernel that was lowered for CPU devices, as a program of its own for absent GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.primitives import team_kernel
from stretto.distributed.primitives.cpu_kernels import LoweredKernel
from stretto.distributed.primitives.team_kernel import TeamKernelInfo
from stretto.distributed.private_jax.kernel_operation import kernel_p

type Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def alone(kernel: LoweredKernel, mesh: Mesh) -> Program:
    """A function that runs `kernel` on the devices of `mesh`, and its operands.

    Args:
      kernel: as it was lowered.
      mesh: of as many devices along as many axes as those that it was lowered for.
    """

    def call(*operands: Any) -> Any:
        return kernel_p.bind(*operands, **kernel.params)

    def body(*operands: Any) -> Any:
        # What is in the kernel is typed for the mesh that it was traced for, of CPU devices.
        with use_abstract_mesh(kernel.abstract_mesh):
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
