"""Scales of operands in 8 bits: granularities, shapes and layouts.

A scale has the layout of its operand: each dimension is 1 or counts blocks of that dimension.

| granularity | lhs `[m, k]` | rhs `[k, n]` | rhs, transposed `[n, k]` |
|---|---|---|---|
| "tensor" | `[]` | `[]` | `[]` |
| "row" | `[m, 1]` | `[1, n]` | `[n, 1]` |
| "block" | `[m, k / 128]` | `[k / 128, n / 128]` | `[n / 128, k / 128]` |
| "mx" | `[m, k / 32]` | | `[n, k / 32]` |

The numbers of blocks are rounded up. One scale of a tensor goes with any granularity of the other
operand, and is spread to that. Scales are in float32, but those of "mx" in float8_e8m0fnu, powers
of two, which both operands have (Open Compute Project, "Microscaling Formats", MXFP8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

BLOCK = 128
"""Elements of a block along each dimension that is cut into blocks."""

MX_BLOCK = 32
"""Elements along k that share a scale of "mx"."""

SCALE_BYTES = 4

FP8 = ("float8_e4m3fn", "float8_e5m2")

type Granularity = Literal["row", "block", "mx"]

GRANULARITIES: tuple[Granularity, ...] = ("row", "block", "mx")
"""That kernels know; one scale of a tensor is spread to "row" or "block"."""


def blocks(size: int) -> int:
    """Blocks along a dimension."""
    return -(-size // BLOCK)


def checked(
    op: str,
    lhs: Any,
    rhs: Sequence[Any],
    lhs_scale: Any,
    rhs_scale: Sequence[Any],
    *,
    rhs_transposed: bool,
    mx: bool = False,
) -> tuple[Granularity, jax.Array, tuple[jax.Array, ...]]:
    """The granularity of a call, and its scales with as many elements as that has.

    Args:
      op: the operation's name, for errors.
      lhs: `[..., k]`.
      rhs: matrices, or for groups of rows `[g, k, n]`, each maybe transposed.
      lhs_scale, rhs_scale: as in the table above, for each of rhs one; None is 1. With groups each
        scale of rhs has their dimension first, or is of one tensor.
      rhs_transposed: rhs is given as `[n, k]`.
      mx: the operation takes scales in float8_e8m0fnu as well.

    Raises:
      ValueError: operands of other types, or scales of another type or shape than they need.
    """
    for name, x in (("lhs", lhs), *(("rhs", x) for x in rhs)):
        if str(x.dtype) not in FP8:
            raise ValueError(
                f"{op}: {name} is {x.dtype}, and scales are for operands of {' and '.join(FP8)};"
                " quantise it (stretto.quantise), or leave out the scales."
            )
    if mx and any(_is_mx(scale) for scale in (lhs_scale, *rhs_scale)):
        if not rhs_transposed:
            raise ValueError(
                f"{op}: scales in float8_e8m0fnu lie along k of rhs [n, k]; pass it so, with"
                " rhs_transposed=True."
            )
        return "mx", *_checked_mx(op, lhs, rhs, lhs_scale, rhs_scale)
    sides = [_Side.of(x, transposed=rhs_transposed) for x in rhs]
    rows = _Side(lead=lhs.shape[:-1], k=lhs.shape[-1], rows=1, transposed=True)
    lhs_kind = _kind(op, "lhs_scale", lhs_scale, rows)
    pairs = list(zip(rhs_scale, sides, strict=True))
    kinds = {lhs_kind, *(_kind(op, "rhs_scale", scale, side) for scale, side in pairs)}
    kinds.discard("tensor")
    if (
        "block" in kinds
        and rows.k > BLOCK
        and any(_kind(op, "rhs_scale", scale, side) == "row" for scale, side in pairs)
    ):
        raise ValueError(
            f"{op}: lhs_scale {jnp.shape(lhs_scale)} has blocks of {BLOCK} along k={rows.k}, and"
            f" rhs_scale {[jnp.shape(x) for x in rhs_scale]} is of columns: it must have blocks of"
            f" {BLOCK} x {BLOCK}, {[side.shape('block') for side in sides]}, or be of one tensor."
        )
    kind: Granularity = "block" if "block" in kinds else "row"
    spread = tuple(side.spread(scale, kind) for scale, side in pairs)
    return kind, rows.spread(lhs_scale, kind), spread


def _is_mx(scale: Any) -> bool:
    return getattr(scale, "dtype", None) == jnp.float8_e8m0fnu


def _checked_mx(
    op: str, lhs: Any, rhs: Sequence[Any], lhs_scale: Any, rhs_scale: Sequence[Any]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Scales of "mx"; None is 1.

    Raises:
      ValueError: one is of another type or shape.
    """
    pairs = [("lhs_scale", lhs_scale, lhs)]
    pairs += [("rhs_scale", scale, x) for scale, x in zip(rhs_scale, rhs, strict=True)]
    found = []
    for name, scale, x in pairs:
        shape = *x.shape[:-1], -(-x.shape[-1] // MX_BLOCK)
        if scale is not None and not (_is_mx(scale) and scale.shape == shape):
            raise ValueError(
                f"{op}: {name} is {getattr(scale, 'dtype', type(scale).__name__)} of shape"
                f" {jnp.shape(scale)}; with another scale in float8_e8m0fnu it must be so too, of"
                f" shape {shape}, one for each {MX_BLOCK} elements along k."
            )
        found.append(jnp.ones(shape, jnp.float8_e8m0fnu) if scale is None else scale)
    return found[0], tuple(found[1:])


class _Side:
    """An operand as its scales see it: rows or columns, along which there are scales, and k."""

    def __init__(self, *, lead: tuple[int, ...], k: int, rows: int, transposed: bool):
        """`lead` are the dimensions before k, of which the last is cut into blocks of `rows`."""
        self.lead, self.k, self.rows, self.transposed = lead, k, rows, transposed

    @classmethod
    def of(cls, rhs: Any, *, transposed: bool) -> _Side:
        """A right-hand side."""
        *groups, a, b = rhs.shape
        n, k = (a, b) if transposed else (b, a)
        return cls(lead=(*groups, n), k=k, rows=BLOCK, transposed=transposed)

    def shape(self, kind: str) -> tuple[int, ...]:
        """The shape of its scales."""
        *groups, n = self.lead
        lead, k = (n, 1) if kind == "row" else (-(-n // self.rows), blocks(self.k))
        return (*groups, lead, k) if self.transposed else (*groups, k, lead)

    def spread(self, scale: Any, kind: str) -> jax.Array:
        """A scale with an element for each that the granularity has."""
        scale = jnp.float32(1) if scale is None else scale
        return jnp.broadcast_to(scale, self.shape(kind))


def _kind(op: str, name: str, scale: Any, side: _Side) -> str:
    """The granularity of one scale.

    Raises:
      ValueError: it has none, or is not in float32.
    """
    if scale is None:
        return "tensor"
    if not hasattr(scale, "dtype") or scale.dtype != jnp.float32:
        found = getattr(scale, "dtype", type(scale).__name__)
        raise ValueError(f"{op}: {name} is {found}; it must be a float32 array. Cast it.")
    shape = tuple(scale.shape)
    groups = side.lead[:-1] if side.rows > 1 else ()
    if shape == () or shape == (*groups, 1, 1):
        return "tensor"
    for kind in ("row", "block"):
        if shape == side.shape(kind):
            return kind
    raise ValueError(
        f"{op}: {name} has shape {shape}; it must be () for one scale,"
        f" {side.shape('row')} for one of each {'row' if side.rows == 1 else 'column'}, or"
        f" {side.shape('block')} for blocks of {side.rows} x {BLOCK}."
    )
