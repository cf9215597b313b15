"""How far products of operands in 8 bits are from the products of the same numbers in float32.

The numbers are the values times their scales, so that what quantising lost is no part of it: what
is left is how the tensor cores add up, and the rounding of the result. Some rows of every shard are
multiplied again, which takes a few milliseconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from stretto.benchmarks.cases.case import Case, call_of
from stretto.benchmarks.cases.meshes import joined
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.xla.quantisation import dequantise

ROWS = 256
"""Rows of a shard that are compared."""


def serves(case: Case) -> bool:
    """Whether the operands have scales, and the result is of one product of all rows."""
    examples = case.operation.examples
    return examples.scales in ("row", "block") and case.operation.communicates


def error_program(case: Case, mesh: Mesh, out: Any, operands: list[jax.ShapeDtypeStruct]) -> Any:
    """Lowered: (result, *operands) -> the largest over devices of `|result - exact| / |exact|`.

    In the Frobenius norm. `out` and `operands` describe the global arrays.
    """
    name, *_ = case.operation.name.split("_fp8")
    plain = call_of(OPERATIONS[name], "xla", axes=mesh.axis_names, rhs_transposed=True)

    def error(out: jax.Array, lhs: Any, rhs: Any, of_lhs: Any, of_rhs: Any) -> jax.Array:
        shard = min(len(out), len(lhs))
        of_rows = _of_rows(of_lhs, len(lhs))
        some = dequantise(_some_rows(lhs, shard), _some_rows(of_rows, shard))
        with jax.default_matmul_precision("highest"):
            exact = plain(some, dequantise(rhs, of_rhs))
        found = _some_rows(out, shard).astype(jnp.float32)
        return lax.pmax(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact), mesh.axis_names)

    compared = jax.shard_map(
        error, mesh=mesh, in_specs=joined(mesh), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(compared).lower(out, *operands)


def _of_rows(scale: jax.Array, rows: int) -> jax.Array:
    """A scale for each row, where one may be of all."""
    return jnp.broadcast_to(scale, (rows, scale.shape[1]))


def _some_rows(x: jax.Array, shard: int) -> jax.Array:
    """The first rows of each shard, which has `shard` rows, one shard after another."""
    return x.reshape(-1, shard, x.shape[1])[:, :ROWS].reshape(-1, x.shape[1])
