"""What every public operation checks of its operands, each with the way out in the message."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer

BACKENDS = ("auto", "pallas", "xla", "simulator")


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}.")


def check_matmul_operands(
    op: str,
    lhs: Any,
    rhs: Any,
    *,
    rhs_transposed: bool = False,
    k_shards: int = 1,
    batches: bool = False,
    scaled: bool = False,
) -> None:
    """Raises ValueError unless `lhs @ rhs` multiplies two matrices of numbers of one type.

    With `k_shards`, lhs is one of so many equal parts of the columns; with `batches` it may have
    more dimensions before them. `scaled` are those that have scales, whose types of 8 bits
    (`scales.checked`) may differ.
    """
    check_flag(op, "rhs_transposed", rhs_transposed)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check_array(op, name, x)
        if x.ndim < 2 or (x.ndim > 2 and not (batches and name == "lhs")):
            more = " or have more dimensions before the rows" if batches and name == "lhs" else ""
            raise ValueError(f"{op}: {name} has shape {x.shape}; it must be a matrix{more}.")
        if not jnp.issubdtype(x.dtype, jnp.number):
            raise ValueError(f"{op}: {name} has dtype {x.dtype}; it must be of numbers. Cast it.")
    if lhs.dtype != rhs.dtype and not scaled:
        raise ValueError(
            f"{op}: lhs is {lhs.dtype} and rhs is {rhs.dtype}; cast one so that they agree."
        )
    k, side = (rhs.shape[1], "columns") if rhs_transposed else (rhs.shape[0], "rows")
    if k_shards * lhs.shape[-1] != k:
        transposed = "transposed " * rhs_transposed
        columns = f"k={lhs.shape[-1]} columns"
        if k_shards > 1:
            columns += f" on each of {k_shards} devices, {k_shards * lhs.shape[-1]} in all,"
        raise ValueError(
            f"{op}: lhs {lhs.shape} has {columns} and {transposed}rhs {rhs.shape}"
            f" has k={k} {side}; they must be equal."
        )


def check_grouped_operands(
    op: str, lhs: Any, rhs: Any, group_sizes: Any, *, rhs_transposed: bool, scaled: bool = False
) -> None:
    """Raises ValueError unless each row of lhs can be multiplied by its group's matrix of rhs."""
    for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        check_array(op, name, x)
    if rhs.ndim != 3:
        raise ValueError(
            f"{op}: rhs has shape {rhs.shape}; it must be [groups, k, n], a matrix for each group."
        )
    matrix = jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)
    check_matmul_operands(op, lhs, matrix, rhs_transposed=rhs_transposed, scaled=scaled)
    if group_sizes.shape != rhs.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"{op}: group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; it must be"
            f" int32[{rhs.shape[0]}], the rows of each of the {rhs.shape[0]} groups of rhs."
        )


def check_array(op: str, name: str, x: Any) -> None:
    """Raises ValueError unless `x` is an array, or describes one as `jax.ShapeDtypeStruct` does."""
    if not (hasattr(x, "ndim") and hasattr(x, "dtype")):
        raise ValueError(
            f"{op}: {name}={x!r:.40} is of type {type(x).__name__}; it must be an array. Convert it"
            " with jnp.asarray."
        )


def as_matrices(op: str, name: str, operand: Any) -> tuple[Any, ...]:
    """A matrix as a tuple of one, a tuple or list as a tuple; ValueError if it is neither."""
    if not isinstance(operand, tuple | list):
        return (operand,)
    if not operand:
        raise ValueError(f"{op}: {name} is empty; pass a matrix or a tuple of matrices.")
    for x in operand:
        check_array(op, name, x)
    return tuple(operand)


def check_pairs(
    op: str, lhs: tuple, rhs: tuple, *, rhs_transposed: bool, scaled: bool = False
) -> None:
    """Raises ValueError unless the products `lhs_i @ rhs_i` can be added up."""
    check_counts(op, lhs, rhs)
    for x, y in zip(lhs, rhs, strict=True):
        check_matmul_operands(op, x, y, rhs_transposed=rhs_transposed, batches=True, scaled=scaled)
    n = 0 if rhs_transposed else 1
    sizes = [((*x.shape[:-1], y.shape[n]), x.dtype) for x, y in zip(lhs, rhs, strict=True)]
    if len(set(sizes)) > 1:
        found = ", ".join(f"{' x '.join(map(str, shape))} of {dtype}" for shape, dtype in sizes)
        raise ValueError(f"{op}: the pairs' products, which are added up, differ: {found}.")


def check_counts(op: str, lhs: tuple, rhs: tuple) -> None:
    """Raises ValueError unless there are as many left-hand as right-hand sides."""
    if len(lhs) != len(rhs):
        raise ValueError(
            f"{op}: there are {len(lhs)} lhs and {len(rhs)} rhs; each needs its counterpart."
        )


def check_divisible(op: str, what: str, size: int, by: int) -> None:
    """Raises ValueError unless `size` (called `what`) is a multiple of the team's size `by`.

    A size that is known when the program runs is left to XLA.
    """
    if isinstance(size, int) and size % by:
        raise ValueError(
            f"{op}: {what}={size} must be a multiple of the {by} devices; pad it to"
            f" {-(-size // by) * by}."
        )


def check_array_axis(op: str, what: str, axis: int, x: Any) -> int:
    """`axis` of `x`, made non-negative; ValueError if out of range, or if `x` is no array."""
    check_array(op, "x", x)
    axis, ndim = check_integer(op, what, axis), x.ndim
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: {what}={axis} is out of range for an array of {ndim} dimensions.")
    return axis % ndim


def check_integer(op: str, what: str, value: Any) -> Any:
    """`value` as an integer; ValueError if it is none, or not known when a program is traced.

    A symbolic size stays what it is.
    """
    if export.is_symbolic_dim(value):
        return value
    if not isinstance(value, bool):  # Of which Python would make 0 or 1.
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(
        f"{op}: {what}={value!r:.60} is of type {type(value).__name__}; it must be an integer"
        " that is known when the program is traced."
    )


def check_flag(op: str, what: str, value: Any) -> bool:
    """`value` as a flag; ValueError if it is none, or not known when a program is traced."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Tracer):
        raise ValueError(f"{op}: {what} is traced; it must be known when the program is traced.")
    raise ValueError(
        f"{op}: {what}={value!r:.60} is of type {type(value).__name__}; it must be True or False."
    )


def is_symbolic(*arrays: Any) -> bool:
    """Whether some size is known when the program runs (`jax.export.symbolic_shape`)."""
    return not all(isinstance(size, int) for x in arrays for size in x.shape)


def check_out_dtype(
    op: str, out_dtype: jax.typing.DTypeLike | None, default: Any, what: str = "out_dtype"
) -> jnp.dtype:
    """`out_dtype`, or `default` where it is None; ValueError unless it is of the default's kind.

    `what` is the argument's name.
    """
    default = jnp.dtype(default)
    try:
        dtype = default if out_dtype is None else jnp.dtype(out_dtype)
    except TypeError as error:
        raise ValueError(f"{op}: {what}={out_dtype!r:.60} is no type: {error}.") from None
    kinds = [jnp.floating, jnp.complexfloating, jnp.integer]
    if not any(all(jnp.issubdtype(x, kind) for x in (dtype, default)) for kind in kinds):
        raise ValueError(
            f"{op}: {what}={dtype} must be of the same kind (floating-point, complex, integer)"
            f" as the operands, {default}."
        )
    return dtype
