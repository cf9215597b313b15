"""Operands, programs and expected results of the fused matmuls, for tests on CPUs and on GPUs.

For each of the three the whole problem is `lhs @ rhs`; they differ in how it lies on the devices.
So the expected result needs neither a collective nor any code that is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.kernels.fused import all_gather_matmul
from stretto.kernels.operations import OPERATIONS as RECORDS

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Every matmul with a collective, by its record's name.
FORMS: dict[str, Callable[..., jax.Array]] = {
    name: functools.partial(record.public, **record.examples.keywords)
    for name, record in RECORDS.items()
    if "k" in record.sizes and record.communicates
}
# The same operation with another operand or dimension gathered has a record of its own.
GATHERS = {name: form for name, form in FORMS.items() if RECORDS[name].examples.keywords}
OPERATIONS = {name: form for name, form in FORMS.items() if name not in GATHERS}
# At the small sizes of tests the default would be the other way of gathering; see `mapped`.
IN_SHARDS = all_gather_matmul.Config()
AS_ONE = all_gather_matmul.Config(gather_first=True)
# Per device, m_shard x k x n_shard: nothing fits a tile, or anything that the hardware likes.
AWKWARD = [(1, 8, 8), (63, 72, 136), (65, 8, 200), (65, 72, 136)]


def mesh_of(*shape: int, axes: tuple[str, ...] = ("x", "y")) -> Mesh:
    """A mesh of the first devices, with the first axes of `axes`.

    In a job of several processes, each of which has one device and must take part, a test of fewer
    devices is skipped.
    """
    count = int(np.prod(shape))
    if processes.COUNT not in (1, count):
        pytest.skip(f"takes {count} devices, and this job has {processes.COUNT}")
    names = axes[: len(shape)]
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))


def specs(name: str, axis: Any = "x") -> tuple[tuple[P, P], P]:
    """How lhs, rhs and the result lie on the devices along `axis`."""
    rows, columns = P(axis, None), P(None, axis)
    if name == "all_gather_matmul":
        return (rows, columns), columns
    if name == "all_gather_matmul_k":
        return (columns, columns), columns
    if name == "all_gather_matmul_n":
        return (rows, columns), rows
    return (columns, rows), rows if name == "matmul_reduce_scatter" else P(None, None)


def whole(name: str, devices: int, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Sizes of the whole problem of which a device has `m` x `k` x `n`.

    But for the dimension that the operation leaves whole.
    """
    if name in ("all_gather_matmul", "all_gather_matmul_n"):
        return devices * m, k, devices * n
    if name == "all_gather_matmul_k":
        return m, devices * k, devices * n
    return devices * m, devices * k, n


def whole_numbers(seed: int, *shape: int, largest: int = 2) -> np.ndarray:
    """Whole numbers from -largest to largest, as float32: products of them sum exactly."""
    drawn = np.random.default_rng(seed).integers(-largest, largest, shape, endpoint=True)
    return drawn.astype(np.float32)


def operands(m: int, k: int, n: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """lhs and rhs of whole numbers, different for every seed."""
    return whole_numbers(2 * seed, m, k), whole_numbers(2 * seed + 1, k, n)


def mapped(name: str, mesh: Mesh, axis: Any = "x", **options: Any) -> Callable[..., jax.Array]:
    """The operation on whole arrays, for use inside a `jit`; gathers go shard by shard."""
    in_specs, out_spec = specs(name, axis)
    if name == "all_gather_matmul":
        options = {"config": IN_SHARDS} | options
    call = functools.partial(FORMS[name], axis_name=axis, **options)
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)


def run(
    name: str,
    lhs: np.ndarray,
    rhs: np.ndarray,
    *,
    devices: int = 2,
    dtype: Any = BF16,
    backend: str = "pallas",
    **options: Any,
) -> np.ndarray:
    """The result of one call on a mesh of `devices`, as float32."""
    program = jax.jit(mapped(name, mesh_of(devices), backend=backend, **options))
    out = program(lhs.astype(dtype), rhs.astype(dtype))
    return np.asarray(out, np.float32)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """`x`, exact in float32, as it is when stored as `dtype`."""
    return x.astype(dtype).astype(np.float32)


def collectives(hlo: str) -> dict[str, int]:
    """How many of each collective a compiled program has, in XLA's names."""
    names = (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
    )
    counts = {n: hlo.count(f" {n}(") + hlo.count(f" {n}-start(") for n in names}
    return {n: count for n, count in counts.items() if count}
