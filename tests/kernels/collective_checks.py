"""Checks of the collectives as single programs, for GPUs and, small, for the simulator."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterable

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st

CALLS: dict[str, Callable[..., jax.Array]] = {
    "all_gather": st.all_gather,
    "reduce_scatter": st.reduce_scatter,
    "all_reduce": st.all_reduce,
    "all_to_all": functools.partial(st.all_to_all, split_axis=0, concat_axis=1),
}
COPIED = ("bfloat16", "float32", "int8", "bool", "float8_e4m3fn")
SUMMED = ("bfloat16", "float16", "float32", "int32")

type Operand = tuple[tuple[int, int], str]


def dtypes_of(name: str) -> tuple[str, ...]:
    """The types that the kernel is for."""
    return SUMMED if name in ("all_reduce", "reduce_scatter") else COPIED


def comparison(name: str, mesh: Mesh, shape: tuple[int, int], dtype: str) -> Callable:
    """A program (seed) -> elements in which the kernel and XLA differ, on every device.

    On whole numbers, whose sums are exact; no two devices hold the same.
    """
    call = functools.partial(CALLS[name], axis_name="x")

    def body(seed):
        key = jax.random.fold_in(jax.random.key(seed), lax.axis_index("x"))
        bounds = (0, 2) if dtype == "bool" else (-6, 7)
        x = jax.random.randint(key, shape, *bounds).astype(dtype)
        ours, xla = (call(x, backend=b).astype(jnp.float32) for b in ("pallas", "xla"))
        return jnp.sum(ours != xla)[None]

    return jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False)


def compare(name: str, mesh: Mesh, operands: Iterable[Operand]) -> list[str]:
    """What is wrong with the kernel on any of the operands. Compiles them side by side."""
    found = []
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        compiled = {}
        for shape, dtype in operands:
            program = jax.jit(comparison(name, mesh, shape, dtype))
            compiled[shape, dtype] = pool.submit(program.lower(jnp.int32(0)).compile)
        for seed, ((shape, dtype), future) in enumerate(compiled.items()):
            wrong = np.asarray(future.result()(jnp.int32(seed)))
            if wrong.any():
                found.append(f"{name} of {dtype} {shape}: wrong elements, by device: {wrong}")
    return found


def per_device(call, *arrays, devices=None, axis="x", mesh=None):
    """Calls `call` on each device with its entry of each array; returns what all of them got."""
    mesh = mesh or cases.mesh_of(devices or len(arrays[0]))
    spec = P(axis)

    def mapped(*xs):
        return jax.tree.map(lambda x: x[None], call(*[x[0] for x in xs]))

    program = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(program)(*arrays))


def drawn(shape, dtype, seed=0):
    """Small whole numbers: no two devices hold the same, and sums of them are exact."""
    dtype = jnp.dtype(dtype)
    low = 0 if dtype in (jnp.bool_, jnp.uint8) else -6
    values = np.random.default_rng(seed).integers(low, 2 if dtype == jnp.bool_ else 7, shape)
    return values.astype(dtype)


def same_bits(got, want):
    want = np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()
