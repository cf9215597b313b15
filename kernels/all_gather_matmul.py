"""All-gather matmul."""

from __future__ import annotations

from typing import Any

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels import checks, reference
from stretto.kernels.dispatch import Choice, Problem, choose, platform_of_mesh
from stretto.kernels.reference import Epilogue


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    epilogue: Epilogue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: Any = None,
    backend: str = "auto",
) -> jax.Array:
    """`epilogue(all_gather(lhs) @ rhs)`, the gather under the matmul."""
    del config
    axes = canonical_axes(axis_name)
    checks.check_matmul_operands("all_gather_matmul", lhs, rhs)
    dtype = checks.check_out_dtype("all_gather_matmul", out_dtype, lhs.dtype)
    _choose(lhs, rhs, axes, dtype, backend)
    return reference.all_gather_matmul(lhs, rhs, axes, epilogue=epilogue, out_dtype=dtype)


def _choose(lhs: Any, rhs: Any, axes: tuple, out_dtype: Any, backend: str) -> Choice:
    platform, device_kind = platform_of_mesh()
    devices = axis_size(axes)
    problem = Problem(
        op="all_gather_matmul",
        m=lhs.shape[0] * devices,
        k=lhs.shape[1],
        n=rhs.shape[1] * devices,
        dtype=str(lhs.dtype),
        out_dtype=str(out_dtype),
        devices=devices,
        platform=platform,
        device_kind=device_kind,
    )
    return choose(problem, backend, unsupported="not built", simulating=False)
