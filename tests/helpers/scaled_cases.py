"""Operands in 8 bits, their scales, programs and exact results of the matmuls that take scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st

E4M3, E5M2, E8M0, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float32
NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def powers_of_two(seed: int, *shape: int) -> np.ndarray:
    """Scales that multiply without an error."""
    return 2.0 ** cases.whole_numbers(seed, *shape, largest=1)


def type_of(kind: str) -> Any:
    """The type of scales."""
    return E8M0 if kind == "mx" else F32


def blocks(size: int) -> int:
    return -(-size // 128)


def scales(kind: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of lhs and of transposed rhs."""
    if kind == "tensor":
        return powers_of_two(2), powers_of_two(3)
    if kind == "row":
        return powers_of_two(2, m, 1), powers_of_two(3, n, 1)
    if kind == "mx":
        return powers_of_two(2, m, -(-k // 32)), powers_of_two(3, n, -(-k // 32))
    return powers_of_two(2, m, blocks(k)), powers_of_two(3, blocks(n), blocks(k))


def spread(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A scale for each element."""
    for axis in range(scale.ndim):
        if scale.shape[axis] not in (1, shape[axis]):
            of_32 = scale.shape[axis] == -(-shape[axis] // 32) != blocks(shape[axis])
            scale = np.repeat(scale, 32 if of_32 else 128, axis)
            scale = scale[: shape[0]] if axis == 0 else scale[:, : shape[1]]
    return np.broadcast_to(scale, shape)


def exact(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> np.ndarray:
    """The product of lhs and transposed rhs, exact for whole numbers and powers of two."""
    return (lhs * spread(lhs_scale, lhs.shape)) @ (rhs * spread(rhs_scale, rhs.shape)).T


def specs(name: str, kind: str) -> tuple[tuple[P, ...], P]:
    """How lhs, transposed rhs, their scales and the result lie along "x"."""
    if name == "all_gather_matmul":
        rows = P("x", None)
        return (rows, rows, *((P(), P()) if kind == "tensor" else (rows, rows))), P(None, "x")
    columns = P(None, "x")
    of_scales = columns if kind in ("block", "mx") else P()
    out = P("x", None) if name == "matmul_reduce_scatter" else P()
    return (columns, columns, of_scales, of_scales), out


def mapped(name: str, kind: str, mesh: Mesh, **options: Any) -> Callable[..., jax.Array]:
    """The operation on whole arrays (lhs, transposed rhs, their scales)."""
    in_specs, out_spec = specs(name, kind)

    def call(lhs, rhs, lhs_scale, rhs_scale):
        given = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale) | options
        return getattr(st, name)(lhs, rhs, "x", rhs_transposed=True, **given)

    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)


def program(name: str, kind: str, mesh: Mesh, **options: Any):
    """The kernel's own choice at a middling size, and the shapes of its operands."""
    m, k, n = (8192 if kind == "block" else 2048), 2048, 2048
    in_specs, _ = specs(name, kind)
    shapes = [(m, k), (n, k), *(x.shape for x in scales(kind, m, k, n))]
    types = [E4M3, E5M2, *[type_of(kind)] * 2]
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, types, in_specs, strict=True)
    ]
    return mapped(name, kind, mesh, backend="pallas", **options), structs


def run(
    name: str,
    kind: str,
    devices: int,
    shape: tuple[int, int, int],
    *,
    dtypes: tuple[Any, Any] = (E4M3, E4M3),
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(the result, what is right) of a device's m x k x n, as `fused_cases.whole` has it."""
    m, k, n = cases.whole(name, devices, *shape)
    lhs, rhs = cases.whole_numbers(0, m, k), cases.whole_numbers(1, n, k)
    given = scales(kind, m, k, n)
    x, y = (jnp.asarray(a, dtype) for a, dtype in zip((lhs, rhs), dtypes, strict=True))
    call = jax.jit(mapped(name, kind, cases.mesh_of(devices), **{"out_dtype": F32} | options))
    of_x, of_y = (jnp.asarray(scale, type_of(kind)) for scale in given)
    return np.asarray(call(x, y, of_x, of_y)), exact(lhs, rhs, *given)


def groups(kind: str, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(the result, what is right) of groups of 40, 0 and 30 rows; 10 of none have NaN."""
    sizes, (m, k, n) = (40, 0, 30), (80, 256, 72)
    lhs, rhs = cases.whole_numbers(0, m, k), cases.whole_numbers(1, 3, n, k)
    each = [scales(kind, m, k, n) for _ in sizes]
    of_lhs, of_rhs = each[0][0], np.stack([2.0**i * y for i, (_, y) in enumerate(each)])
    want, first = np.zeros((m, n), np.float32), 0
    for i, size in enumerate(sizes):
        rows = slice(first, first + size)
        whole = exact(lhs, rhs[i], of_lhs, of_rhs[i])
        want[rows] = whole[rows]
        first += size
    of_lhs[first:] = np.nan

    @jax.jit
    def call(lhs, rhs, sizes, of_lhs, of_rhs):
        given = dict(lhs_scale=of_lhs, rhs_scale=of_rhs, out_dtype=F32) | options
        return st.grouped_matmul(lhs, rhs, sizes, rhs_transposed=True, backend=backend, **given)

    values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E5M2), jnp.asarray(sizes)
    of_both = (jnp.asarray(scale, type_of(kind)) for scale in (of_lhs, of_rhs))
    return np.asarray(call(*values, *of_both)), want
