"""Leading dimensions as rows: what a matmul's kernel takes, and how a batch becomes that.

A kernel gathers and scatters whole blocks of rows, one of each device. Of `[a, s, b, k]` on each
device, gathered along the second dimension, it makes rows in the order `[D, a, s, b]`, where
`[a, D, s, b]` are wanted. With `a` of 1 these are the same. Where the `s * b` rows of a block are
whole tiles, the kernel stores them in order or, for a scatter, loads them so
(`fused.row_blocks`). Otherwise XLA puts the result in order or, for a scatter, lhs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Call
from stretto.kernels.problem import checks
from stretto.kernels.problem.epilogue import with_arrays

# Rows that the tiles of every configuration divide, but for those of operands in 8 bits.
WHOLE_TILES = 256

type Shape = tuple[int, ...]
type Matrices = tuple[jax.Array, ...]


def checked_axis(op: str, axis: int, lhs: Any) -> int:
    """`axis` of lhs, which is not its last: the contraction.

    Raises:
      ValueError: it is out of range, or the last one.
    """
    found = checks.check_array_axis(op, "axis", axis, lhs)
    if found == lhs.ndim - 1:
        raise ValueError(
            f"{op}: axis={axis} of lhs {lhs.shape} is the contraction; pass one of the dimensions"
            " before it."
        )
    return found


def as_rows(x: jax.Array) -> jax.Array:
    """`[..., k]` -> `[rows, k]`."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def blocks_before(shape: Shape, axis: int) -> int:
    """The blocks of rows that a device's part of `shape` along `axis` consists of."""
    return math.prod(shape[:axis])


def fills_tiles(shape: Shape, axis: int) -> bool:
    """Whether each block of rows of a device's part `shape`, without k, is made of whole tiles."""
    return not math.prod(shape[axis:]) % WHOLE_TILES


def in_order(rows: jax.Array, shape: Shape, axis: int, parts: int) -> jax.Array:
    """Gathered rows `[parts * rows, n]` -> `[..., parts * s, ..., n]`, `shape` without k each."""
    before, size, after = shape[:axis], shape[axis], shape[axis + 1 :]
    x = rows.reshape(parts, math.prod(before), size, *after, rows.shape[-1])
    return jnp.moveaxis(x, 0, 1).reshape(*before, parts * size, *after, rows.shape[-1])


def by_parts(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """`[..., parts * s, ..., k]` -> its rows, `[parts * rows, k]`: those of each part together."""
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    y = x.reshape(math.prod(before), parts, size // parts, *after)
    return jnp.moveaxis(y, 1, 0).reshape(-1, x.shape[-1])


# --- Rules of `vmap`: one launch where one operand alone has a batch ------------------------------


def columns_together(x: jax.Array, transposed: bool) -> jax.Array:
    """Right-hand sides as one: `[b, k, n]` -> `[k, b * n]`, or `[b, n, k]` -> `[b * n, k]`."""
    if transposed:
        return x.reshape(-1, x.shape[2])
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def columns_apart(out: jax.Array, size: int) -> jax.Array:
    """`[m, b * n]` -> `[b, m, n]`."""
    return jnp.moveaxis(out.reshape(out.shape[0], size, -1), 1, 0)


def of_gather(run: Any, size: int, batched: Any, operands: Any, call: Call) -> Any:
    """The rule of an all-gather matmul's kernel."""
    lhs, rhs, arrays = with_arrays(operands)
    lhs_batched, rhs_batched, arrays_batched = with_arrays(batched)
    options = call.options
    if not are_for_all_rows(arrays, arrays_batched):
        return None
    if not any(rhs_batched):
        # One batch more of blocks, or with columns gathered of rows.
        kept = options.axis == 0 and call.split is None
        blocks = size * options.blocks if kept else 1
        outs, gathered = run((as_rows(lhs), rhs, arrays), call.with_options(blocks=blocks))
        parts = gathered_parts(lhs, outs[0], options.axis)

        def apart(x: jax.Array, ordered: bool) -> jax.Array:
            if ordered:
                return x.reshape(size, -1, x.shape[1])
            return in_order(x, lhs.shape[:2], 1, parts)

        outs = tuple(apart(x, kept or options.axis == 1) for x in outs)
        return outs, None if gathered is None else apart(gathered, options.axis == 1)
    if lhs_batched or arrays or not all(rhs_batched):
        return None
    sides = tuple(columns_together(x, options.rhs_transposed) for x in rhs)
    outs, gathered = run((lhs, sides), call)
    if gathered is not None:
        gathered = jnp.broadcast_to(gathered, (size, *gathered.shape))
    return tuple(columns_apart(out, size) for out in outs), gathered


def are_for_all_rows(arrays: Any, batched: Any) -> bool:
    """Whether an epilogue's arrays are rows `[1, n]`, the same for every matrix of a batch."""
    return not any(jax.tree.leaves(batched)) and all(
        x.shape[0] == 1 for x in jax.tree.leaves(arrays)
    )


def gathered_parts(lhs: jax.Array, out: jax.Array, axis: int) -> int:
    """How many devices' rows `out` has, of a batch `lhs` on each."""
    return 1 if axis == 1 else out.shape[0] // (lhs.shape[0] * lhs.shape[1])


def of_scatter(run: Any, size: int, batched: Any, operands: Any, call: Call) -> Any:
    """The rule of a matmul reduce-scatter's kernel."""
    return _of_sum(run, size, batched, operands, call, axis_size(call.axes))


def of_reduce(run: Any, size: int, batched: Any, operands: Any, call: Call) -> Any:
    """The rule of a matmul all-reduce's kernel."""
    return _of_sum(run, size, batched, operands, call, 1)


def _of_sum(run: Any, size: int, batched: Any, operands: Any, call: Call, parts: int) -> Any:
    lhs, rhs, arrays = with_arrays(operands)
    lhs_batched, rhs_batched, arrays_batched = with_arrays(batched)
    if not are_for_all_rows(arrays, arrays_batched):
        return None
    if all(lhs_batched) and not any(rhs_batched):
        kept = parts > 1 and call.split is None
        rows = tuple(as_rows(x) if kept else by_parts(x, 1, parts) for x in lhs)
        blocks = size * call.options.blocks if kept else 1
        out = run((rows, rhs, arrays), call.with_options(blocks=blocks))
        return out.reshape(size, -1, out.shape[1])
    if all(rhs_batched) and not any(lhs_batched) and not arrays:
        transposed = call.options.rhs_transposed
        sides = tuple(columns_together(x, transposed) for x in rhs)
        return columns_apart(run((lhs, sides), call), size)
    return None
