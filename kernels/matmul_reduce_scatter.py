"""Matmul reduce-scatter."""

from __future__ import annotations

from typing import Any

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels import checks, reference


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: Any = None,
    backend: str = "auto",
) -> jax.Array:
    """`reduce_scatter(lhs @ rhs)` along the rows."""
    del config
    axes = canonical_axes(axis_name)
    checks.check_backend(backend)
    checks.check_matmul_operands("matmul_reduce_scatter", lhs, rhs)
    checks.check_divisible("matmul_reduce_scatter", "m", lhs.shape[0], axis_size(axes))
    dtype = checks.check_out_dtype("matmul_reduce_scatter", out_dtype, lhs.dtype)
    return reference.matmul_reduce_scatter(lhs, rhs, axes, out_dtype=dtype)
