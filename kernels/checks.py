"""What every public operation checks of its operands, each with the way out in the message."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BACKENDS = ("auto", "pallas", "xla", "simulator")


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}.")


def check_matmul_operands(op: str, lhs: Any, rhs: Any) -> None:
    """Raises ValueError unless `lhs @ rhs` multiplies two floating-point matrices of one type."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.ndim != 2:
            raise ValueError(
                f"{op}: {name} has shape {x.shape}; it must be a matrix. Fold leading dimensions"
                " into the rows with reshape."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{op}: {name} has dtype {x.dtype}; it must be a floating-point type (bfloat16,"
                " float16, float32, float64). Cast it."
            )
    if lhs.dtype != rhs.dtype:
        raise ValueError(
            f"{op}: lhs is {lhs.dtype} and rhs is {rhs.dtype}; cast one so that they agree."
        )
    if lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            f"{op}: lhs {lhs.shape} has k={lhs.shape[1]} columns and rhs {rhs.shape} has"
            f" k={rhs.shape[0]} rows; they must be equal."
        )


def check_divisible(op: str, what: str, size: int, by: int) -> None:
    """Raises ValueError unless `size` (called `what`) is a multiple of the team's size `by`."""
    if size % by:
        raise ValueError(
            f"{op}: {what}={size} must be a multiple of the {by} devices; pad it to"
            f" {-(-size // by) * by}."
        )


def check_array_axis(op: str, what: str, axis: int, ndim: int) -> int:
    """`axis` of an array of `ndim` dimensions, made non-negative; ValueError if out of range."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: {what}={axis} is out of range for an array of {ndim} dimensions.")
    return axis % ndim


def check_out_dtype(op: str, out_dtype: jax.typing.DTypeLike | None, default: Any) -> jnp.dtype:
    """`out_dtype`, or `default` where it is None; ValueError unless it is a floating-point type."""
    dtype = jnp.dtype(default if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{op}: out_dtype={dtype} must be a floating-point type.")
    return dtype
