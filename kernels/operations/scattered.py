"""The matmuls whose products are added up over the devices: operands, references, work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size, varying_axes
from stretto.kernels.operation import Axes, Operand, Sizes
from stretto.kernels.operations import batches, epilogues
from stretto.kernels.problem import checks, epilogue
from stretto.kernels.problem.epilogue import Fitted, Shape, with_arrays
from stretto.kernels.problem.options import MatmulOptions, ScatterOptions
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import accumulator_dtype, sum_of_products

type Matrices = tuple[jax.Array, ...]


def checked_pairs(
    op: str, lhs: Any, rhs: Any, out_dtype: Any, rhs_transposed: bool, *, scaled: bool = False
) -> tuple[tuple[Matrices, Matrices], MatmulOptions]:
    """The operands as tuples of equal length, checked, and the options."""
    lhs = checks.as_matrices(op, "lhs", lhs)
    rhs = checks.as_matrices(op, "rhs", rhs)
    checks.check_pairs(op, lhs, rhs, rhs_transposed=rhs_transposed, scaled=scaled)
    default = jnp.bfloat16 if scaled else lhs[0].dtype
    dtype = checks.check_out_dtype(op, out_dtype, default)
    return (lhs, rhs), MatmulOptions(out_dtype=dtype, rhs_transposed=rhs_transposed)


def fitted(
    op: str,
    given: epilogues.Like,
    pairs: tuple[Matrices, Matrices],
    result: Shape,
    *,
    replicated: Axes = (),
) -> Fitted:
    """The epilogue of a sum, of whose `result` each device has its part; or, `replicated`, all.

    Raises:
      ValueError: it does not fit, or it is gated, or an array differs between devices where all
        must hold the same.
    """
    given = epilogues.of(op, given)
    if given is not None and given.gated:
        raise ValueError(
            f"{op}: the epilogue is gated, and there is one sum; pass it to all_gather_matmul, with"
            " rhs as a tuple (gate, up)."
        )
    found = epilogue.fitted(op, given, [result], accumulator_dtype(pairs[0][0].dtype))
    for index, array in enumerate(jax.tree.leaves(found.arrays)):
        if varying := varying_axes(array) & frozenset(replicated):
            raise ValueError(
                f"{op}: array {index} of the epilogue varies over {sorted(map(str, varying))}; it"
                " must be the same on every device, as the result is."
            )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a sum lies: scattered along a dimension, or whole on every device.

    Attributes:
      axis: of lhs and of the result, along which it is scattered; None where it is not.
      devices: of the team.
      rows: the dimensions of one device's result but the last.
      replicated: the axes over which the result is the same; none where it is scattered.
    """

    axis: int | None
    devices: int
    rows: Shape
    replicated: Axes

    @classmethod
    def checked(cls, op: str, lhs: jax.Array, axes: Axes, axis: int | None) -> Placement:
        """That of the sum of `lhs @ rhs`, with one of the left-hand sides, `[..., k_shard]`.

        Raises:
          ValueError: `axis` is none that can be scattered, or its size is no multiple of D.
        """
        devices, rows = axis_size(axes), list(lhs.shape[:-1])
        if axis is None:
            return cls(axis=None, devices=devices, rows=tuple(rows), replicated=axes)
        axis = batches.checked_axis(op, axis, lhs)
        what = "m" if lhs.ndim == 2 else f"dimension {axis}"
        checks.check_divisible(op, what, rows[axis], devices)
        rows[axis] //= devices
        return cls(axis=axis, devices=devices, rows=tuple(rows), replicated=())

    def added_to(self, options: MatmulOptions) -> MatmulOptions | ScatterOptions:
        """The options of such a sum."""
        return options if self.axis is None else ScatterOptions(**vars(options), axis=self.axis)

    @property
    def blocks(self) -> int:
        """Blocks of rows, of a batch, each of which is scattered over all devices."""
        return 1 if self.axis is None else batches.blocks_before(self.rows, self.axis)

    def rows_for_kernel(self, lhs: jax.Array, blocks: int) -> jax.Array:
        """`[..., k]` -> `[rows, k]`: in order, in `blocks`, or if that is 1 by devices."""
        if self.axis is None or blocks > 1:
            return batches.as_rows(lhs)
        return batches.by_parts(lhs, self.axis, self.devices)

    def copied_elements(self, lhs: Sequence[jax.Array], *, by_kernel: bool = False) -> int:
        """Elements of `lhs` that have to be put in order.

        `by_kernel` says that the kernel does so, where blocks are made of whole tiles.
        """
        if self.axis is None or self.blocks == 1:
            return 0
        if by_kernel and batches.fills_tiles(self.rows, self.axis):
            return 0
        return sum(x.size for x in lhs)


def sizes_of(
    pairs: tuple[Matrices, Matrices], axes: Axes, options: MatmulOptions
) -> dict[str, int]:
    """m, k, n of the whole problem, over all devices."""
    lhs, rhs = pairs
    m, k = math.prod(lhs[0].shape[:-1]), axis_size(axes) * sum(x.shape[-1] for x in lhs)
    return dict(m=m, k=k, n=rhs[0].shape[0 if options.rhs_transposed else 1])


def reduce_scatter_reference(operands: Any, axes: Axes, options: ScatterOptions) -> jax.Array:
    """`epilogue(reduce_scatter(sum of lhs_i @ rhs_i))`, along `options.axis`.

    The sum is in the result's type. The epilogue's arrays, if it has any, come after lhs and rhs.
    lhs may be rows in `options.blocks`, as kernels take it.
    """
    lhs, rhs, arrays = with_arrays(operands)
    product = sum_of_products(lhs, rhs, options.rhs_transposed).astype(options.out_dtype)
    if options.blocks > 1:
        batch = product.reshape(options.blocks, -1, product.shape[1])
        out = batches.as_rows(collectives.reduce_scatter(batch, axes, axis=1))
    else:
        out = collectives.reduce_scatter(product, axes, axis=options.axis)
    return out if options.epilogue is None else options.epilogue.after((out,), arrays)[0]


def all_reduce_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`epilogue(all_reduce(sum of lhs_i @ rhs_i))`, likewise."""
    lhs, rhs, arrays = with_arrays(operands)
    product = sum_of_products(lhs, rhs, options.rhs_transposed).astype(options.out_dtype)
    out = collectives.all_reduce(product, axes)
    return out if options.epilogue is None else options.epilogue.after((out,), arrays)[0]


def work(problem: Problem, *, collective: str) -> Work:
    """A device multiplies its part of the contraction; what travels is the result."""
    m, k, n = (problem.sizes[name] for name in "mkn")
    traffic = Traffic(
        collective=collective,
        shape=(m, n),
        itemsize=problem.types.out_itemsize,
        devices=problem.devices,
    )
    return Work(product=(m, -(-k // problem.devices), n), traffic=traffic)


def example_operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """lhs and rhs of one device."""
    k = sizes["k"] // devices
    return Operand(shape=(sizes["m"], k)), Operand(shape=(k, sizes["n"]))
