"""Programs to compile: a function, and operands on a mesh of GPUs that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import subjects
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MIDDLING = (2048, 1024, 2048)
type Program = tuple[str, Callable, list[jax.ShapeDtypeStruct]]


def fused(name: str, mesh: Mesh, sizes=MIDDLING, *, axis: Any = "x", dtype=jnp.bfloat16, **options):
    """One call of a fused matmul on operands that lie as it wants them."""
    m, k, n = sizes
    in_specs, _ = cases.specs(name, axis)
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(m, k), (k, n)], in_specs, strict=True)
    ]
    options = {"config": None} | options  # The kernel's own choice.
    return cases.mapped(name, mesh, axis, backend="pallas", **options), structs


def on_one(body: Callable, mesh: Mesh, shapes: list[tuple[tuple[int, ...], Any]]) -> tuple:
    """A program of operands that all devices have alike."""
    sharding = NamedSharding(mesh, P())
    structs = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(),) * len(shapes), out_specs=P(), check_vma=False
    )
    return mapped, structs


def on_scalars(body: Callable, mesh: Mesh, count: int) -> tuple:
    """A program of whole numbers that all devices get alike."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return subjects.on_mesh(body, mesh), [scalar] * count
