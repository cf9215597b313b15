"""Cases of `compile_cases`: programs of jobs of several processes, and of several nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import fused_cases as cases
import jax
import jax.numpy as jnp
import subjects
from compile_programs import Program, fused
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import settings, xla_flags
from stretto.distributed.devices import clique
from stretto.distributed.private_jax import cudnn_attention
from stretto.distributed.tools import aot
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem import node_config


def a_process_a_gpu() -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",), processes=4)
    for name in cases.OPERATIONS:
        yield name, *fused(name, mesh)


def layers_of_a_process_a_gpu() -> Iterator[Program]:
    """A scan over layers, as `stretto.initialize` has XLA compile it in such a job."""
    xla_flags.share_memory_of_kernels(os.environ)
    mesh = aot.mesh_of_gpus((2,), ("x",), processes=2)

    def body(lhs, rhs):
        layer = lambda x, w: (2 * x, st.all_gather_matmul(x, w, "x", backend="pallas"))  # noqa: E731
        return lax.scan(layer, lhs, rhs)[1]

    specs = P("x"), P(None, None, "x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(256, 512), (3, 512, 512)], specs, strict=True)
    ]
    yield "layers", mapped, structs


def memory_of_one_process() -> Iterator[Program]:
    """A call between two kernels, whose operand and result processes do not share."""
    mesh = aot.mesh_of_gpus((2,), ("x",), processes=2)
    jax.process_count = lambda: 2  # Of the job that is compiled for.
    jax.local_device_count = lambda: 1

    def body(x):
        own = cudnn_attention.in_own_memory
        found = own(lax.sort(own(st.all_gather(x, "x", backend="pallas"))))
        return st.reduce_scatter(found, "x", backend="pallas")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    yield (
        "sorted",
        mapped,
        [jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))],
    )


def two_nodes(process: int, processes: int) -> Iterator[Program]:
    """A fused matmul over the devices of a node, seen from one of the processes of two nodes."""
    clique.this_process = lambda mesh: process
    clique.are_several = lambda: True
    mesh = aot.mesh_of_gpus((2, 2), ("x", "y"), processes=processes)

    def body(lhs, rhs):
        return lax.psum(st.all_gather_matmul(lhs, rhs, "y", backend="pallas"), "x")

    specs = P(("x", "y")), P(None, "y")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(2048, 1024), (1024, 1024)], specs, strict=True)
    ]
    with settings.nodes_of(2):
        yield f"process {process} of {processes}", mapped, structs


def hierarchical(name: str) -> Iterator[Program]:
    """An operation over two nodes, in several pieces."""
    mesh = aot.mesh_of_gpus((2, 2), ("x", "y"), processes=2)
    both, config = ("x", "y"), node_config.Config(pieces=2)
    with settings.nodes_of(2):
        if name in cases.OPERATIONS:
            yield name, *fused(name, mesh, (8192, 1024, 1024), axis=both, config=config)
            return
        sharding = NamedSharding(mesh, P(both))
        mapped = jax.shard_map(
            functools.partial(
                OPERATIONS[name].public, axis_name=both, backend="pallas", config=config
            ),
            mesh=mesh,
            in_specs=P(both),
            out_specs=P(both) if name == "reduce_scatter" else P(),
            check_vma=False,
        )
        yield name, mapped, [jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16, sharding=sharding)]


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "a process a GPU": a_process_a_gpu,
    "layers of a process a GPU": layers_of_a_process_a_gpu,
    "memory of one process": memory_of_one_process,
    **{
        f"hierarchical {name}": functools.partial(hierarchical, name)
        for name in subjects.HIERARCHICAL
    },
    **{
        f"two nodes {process} {processes}": functools.partial(two_nodes, process, processes)
        for process, processes in ((0, 2), (1, 2), (3, 4))
    },
}
