"""Cases of `compile_cases`: the collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from compile_programs import Program
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.collectives import summed_norm_by_heap


def collectives(target: str = "h100") -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",), target=target)
    calls = {
        "all_gather": (st.all_gather, (1024, 512), P(None)),
        "reduce_scatter": (st.reduce_scatter, (1024, 512), P("x")),
        "all_reduce in one shot": (st.all_reduce, (32, 512), P(None)),
        "all_reduce in two": (st.all_reduce, (4096, 512), P(None)),
        "all_to_all": (
            functools.partial(st.all_to_all, split_axis=0, concat_axis=0),
            (1024, 512),
            P("x"),
        ),
    }
    for label, (call, (rows, columns), out_spec) in calls.items():
        mapped = jax.shard_map(
            functools.partial(call, axis_name="x", backend="pallas"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=out_spec,
            check_vma=False,
        )
        sharding = NamedSharding(mesh, P("x"))
        yield (
            label,
            mapped,
            [jax.ShapeDtypeStruct((4 * rows, columns), jnp.bfloat16, sharding=sharding)],
        )


def sums_and_norms() -> Iterator[Program]:
    """In one shot and in two, of few devices and of many, and of a residual of another type."""
    for label, devices, shape, residual in (
        ("one shot", 2, (6, 6144), "bfloat16"),
        ("two shots", 4, (512, 6144), "bfloat16"),
        ("two shots of eight", 8, (512, 7168), "bfloat16"),
        ("float32", 4, (138, 2816), "float32"),
    ):
        mesh = aot.mesh_of_gpus((devices,), ("x",))
        call = jax.shard_map(
            functools.partial(st.all_reduce_rms_norm, axis_name="x", backend="pallas"),
            mesh=mesh,
            in_specs=(P("x"), P(), P()),
            out_specs=P(),
        )
        structs = [
            jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
            for size, dtype, spec in (
                ((devices * shape[0], shape[1]), "bfloat16", P("x")),
                (shape, residual, P()),
                (shape[1:], "float32", P()),
            )
        ]
        yield label, call, structs


def through_the_heap(devices: int, n: int) -> Iterator[Program]:
    """Messages to peers and, on more than two devices, to this device itself."""
    mesh = aot.mesh_of_gpus((devices,), ("x",))
    config = summed_norm_by_heap.Config()
    call = jax.shard_map(
        functools.partial(st.all_reduce_rms_norm, axis_name="x", backend="pallas", config=config),
        mesh=mesh,
        in_specs=(P("x"), P(), P()),
        out_specs=P(),
    )
    structs = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for size, spec in (((devices * 6, n), P("x")), ((6, n), P()), ((n,), P()))
    ]
    yield f"sum and norm on {devices}", call, structs


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "collectives": collectives,
    "Blackwell collectives": functools.partial(collectives, "b200"),
    "sums and norms": sums_and_norms,
    "through the heap of 2": functools.partial(through_the_heap, 2, 6144),
    "through the heap of 8": functools.partial(through_the_heap, 8, 8192),
}
