"""The three dimensions that an all-gather matmul may gather along: operands, sizes, results.

Of the whole problem, `M x K x N`:

| `gather_axis` | gathers | along its | and the kernel gets it as |
|---|---|---|---|
| "m" | lhs | rows | it is |
| "k" | lhs | columns | it is |
| "n" | rhs | columns | rows of the transposed problem, with lhs as a transposed rhs |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax

from stretto.distributed.private_jax.names import named
from stretto.kernels.fused import row_blocks
from stretto.kernels.operation import Axes, Operand, Sizes
from stretto.kernels.operations import batches
from stretto.kernels.operations.with_epilogue import flat_arrays
from stretto.kernels.problem import checks
from stretto.kernels.problem.epilogue import Fitted, Form, Shape, with_arrays
from stretto.kernels.problem.options import GatherOptions
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import matmul

type GatherAxis = Literal["m", "k", "n"]
type Matrices = tuple[jax.Array, ...]

OP = "all_gather_matmul"
GATHER_AXES = ("m", "k", "n")


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a call, checked; `sides` are its right-hand sides.

    Attributes:
      gather_axis: "m", "k" or "n".
      axis: of lhs, along which it is gathered; the last one for "k". 0 for "n".
      lhs, sides: as the caller gave them, the latter as a tuple.
      transposed: whether `sides` are given transposed.
      devices: of the team.
    """

    gather_axis: str
    axis: int
    lhs: jax.Array
    sides: tuple[jax.Array, ...]
    transposed: bool
    devices: int

    @classmethod
    def checked(
        cls,
        gather_axis: str,
        axis: int | None,
        lhs: jax.Array,
        rhs: Any,
        transposed: bool,
        devices: int,
        *,
        scaled: bool = False,
    ) -> Operands:
        """The operands, if they fit each other.

        Raises:
          ValueError: they do not, or `gather_axis` is unknown, or several right-hand sides are to
            be gathered.
        """
        if gather_axis not in GATHER_AXES:
            known = ", ".join(map(repr, GATHER_AXES))
            raise ValueError(f"{OP}: gather_axis={gather_axis!r} is not one of {known}.")
        sides = checks.as_matrices(OP, "rhs", rhs)
        if gather_axis == "n" and isinstance(rhs, tuple | list):
            raise ValueError(
                f"{OP}: gather_axis='n' gathers rhs and takes one matrix, not a"
                f" {type(rhs).__name__} of {len(rhs)}; call it once for each."
            )
        for side in sides:
            checks.check_matmul_operands(
                OP,
                lhs,
                side,
                rhs_transposed=transposed,
                k_shards=devices if gather_axis == "k" else 1,
                batches=True,
                scaled=scaled,
            )
        if gather_axis != "m" and axis is not None:
            raise ValueError(f"{OP}: axis={axis} is for gather_axis='m' only; leave it out.")
        axis = batches.checked_axis(OP, 0 if axis is None else axis, lhs)
        axis = lhs.ndim - 1 if gather_axis == "k" else axis
        return cls(gather_axis, axis, lhs, sides, transposed, devices)

    def sizes(self) -> Sizes:
        """m, k, n of the whole problem, over all devices."""
        m, k = math.prod(self.lhs.shape[:-1]), self.lhs.shape[-1]
        n = self.devices * sum(side.shape[0 if self.transposed else 1] for side in self.sides)
        if self.gather_axis == "k":
            return dict(m=m, k=self.devices * k, n=n)
        return dict(m=self.devices * m, k=k, n=n)

    def rows(self) -> tuple[int, ...]:
        """The dimensions of a result on one device but the last."""
        rows = list(self.lhs.shape[:-1])
        if self.gather_axis == "m":
            rows[self.axis] *= self.devices
        return tuple(rows)

    def products(self) -> list[tuple[int, ...]]:
        """The shape of each result on one device."""
        n = self.devices if self.gather_axis == "n" else 1
        return [(*self.rows(), n * side.shape[0 if self.transposed else 1]) for side in self.sides]

    def results_shapes(self, form: Form | None) -> list[Shape]:
        """The same for the results of an epilogue."""
        return self.products()[: 1 if form is not None and form.gated else None]

    @property
    def blocks(self) -> int:
        """Blocks of rows, of a batch, that a kernel gathers from each device."""
        return batches.blocks_before(self.lhs.shape, self.axis) if self.gather_axis == "m" else 1

    def copied_elements(self, *, by_kernel: bool = False) -> int:
        """Elements of the results that have to be put in order.

        `by_kernel` says that the kernel does so, where blocks are made of whole tiles.
        """
        if self.blocks == 1 or (by_kernel and batches.fills_tiles(self.lhs.shape[:-1], self.axis)):
            return 0
        return sum(map(math.prod, self.products()))

    def for_kernel(self) -> tuple[jax.Array, tuple[jax.Array, ...], bool]:
        """(what is gathered, what it is multiplied by, whether that is transposed)."""
        lhs = batches.as_rows(self.lhs)
        if self.gather_axis == "n":
            (rhs,) = self.sides
            return rhs if self.transposed else rhs.T, (lhs,), True
        return lhs, self.sides, self.transposed

    def arrays_for_kernel(self, found: Fitted, blocks: int) -> tuple[Any, ...]:
        """The arrays of an epilogue, along the rows and columns of the kernel's results.

        These are in order, of `blocks`, or if that is 1 by devices.
        """

        def by_rows(x: jax.Array) -> jax.Array:
            if self.gather_axis == "m" and blocks == 1:
                return batches.by_parts(x, self.axis, self.devices)
            return batches.as_rows(x)

        arrays = flat_arrays(found.arrays, self.results_shapes(found.form), by_rows)
        return jax.tree.map(lambda x: x.T, arrays) if self.gather_axis == "n" else arrays

    def results(
        self, outs: Sequence[jax.Array], gathered: Any, blocks: int = 1
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """The products and the gathered operand in the form that the caller expects.

        The products are in order, of `blocks`, or if that is 1 by devices.
        """
        if self.gather_axis == "n":
            if gathered is not None and not self.transposed:
                gathered = gathered.T
            return tuple(self._shaped(out.T) for out in outs), gathered
        gathered = None if gathered is None else self._shaped(gathered)
        if blocks > 1:
            return tuple(x.reshape(*self.rows(), x.shape[-1]) for x in outs), gathered
        return tuple(map(self._shaped, outs)), gathered

    def _shaped(self, rows: jax.Array) -> jax.Array:
        """A result of the kernel in the dimensions of lhs."""
        if self.gather_axis == "m":
            return batches.in_order(rows, self.lhs.shape[:-1], self.axis, self.devices)
        return rows.reshape(*self.rows(), rows.shape[-1])


def as_given(outs: Matrices, rhs: Any, form: Form | None) -> Any:
    """The results as the caller gave `rhs`: a tuple, or one; of a gated epilogue one."""
    several = isinstance(rhs, tuple | list) and not (form and form.gated)
    return outs if several else outs[0]


def reference(
    operands: Any, axes: Axes, options: GatherOptions, *, gather_axis: str
) -> tuple[Matrices, jax.Array]:
    """`epilogue(lhs @ x)` for each `x` of rhs, one of both gathered, and what was gathered.

    lhs `[..., k]` is gathered along `options.axis` ("m", "k"), or the only `x` along its columns
    ("n"). The epilogue's arrays, if it has any, come after lhs and rhs. lhs may be rows in
    `options.blocks`, as kernels take it.
    """
    lhs, rhs, arrays = with_arrays(operands)
    if options.blocks > 1:
        return _of_blocks(lhs, rhs, arrays, axes, options)
    if gather_axis == "n":
        (shard,), axis = rhs, 0 if options.rhs_transposed else 1
    else:
        shard, axis = lhs, options.axis
    gathered = named(collectives.all_gather(shard, axes, axis=axis), "gathered")
    lhs, rhs = (lhs, (gathered,)) if gather_axis == "n" else (gathered, rhs)
    outs = tuple(matmul(lhs, x.T if options.rhs_transposed else x) for x in rhs)
    if options.epilogue is not None:
        outs = options.epilogue.results(outs, arrays)
    return tuple(out.astype(options.out_dtype) for out in outs), gathered


def _of_blocks(
    lhs: jax.Array, rhs: Matrices, arrays: Any, axes: Axes, options: GatherOptions
) -> tuple[Matrices, jax.Array]:
    """`reference` of rows in blocks: the results by blocks, and what was gathered by devices."""
    blocks = options.blocks
    batch = lhs.reshape(blocks, -1, lhs.shape[1])
    arrays = jax.tree.map(
        lambda x: x[None] if len(x) == 1 else x.reshape(blocks, -1, x.shape[1]), arrays
    )
    plain = dataclasses.replace(options, blocks=1, axis=1)
    outs, gathered = reference((batch, rhs, arrays), axes, plain, gather_axis="m")
    devices = gathered.shape[1] // batch.shape[1]
    whole = batches.as_rows(gathered)
    outs = tuple(map(batches.as_rows, outs))
    return outs, row_blocks.dealt(whole, blocks, devices)


def work(problem: Problem, *, gather_axis: str) -> Work:
    """A device multiplies its part of the whole; what travels is a shard of one operand.

    A shard of columns is moved transposed, by rows (`all_gather_matmul_n`).
    """
    m, k, n = (problem.sizes[name] for name in "mkn")
    d = problem.devices
    shapes = {"m": (-(-m // d), k), "k": (m, -(-k // d)), "n": (-(-n // d), k)}
    product = (-(-m // d), k, n) if gather_axis == "n" else (m, k, -(-n // d))
    traffic = Traffic(
        collective="all_gather",
        shape=shapes[gather_axis],
        itemsize=problem.types.itemsize,
        devices=d,
    )
    return Work(product=product, traffic=traffic)


def example_operands(sizes: Sizes, devices: int, *, gather_axis: str) -> tuple[Operand, ...]:
    """lhs and rhs of one device."""
    m, k, n = (sizes[name] for name in "mkn")
    lhs = (m, k // devices) if gather_axis == "k" else (m // devices, k)
    return Operand(shape=lhs), Operand(shape=(k, n // devices))


def example_needs(
    sizes: Sizes, devices: int, *, gather_axis: str
) -> tuple[tuple[str, int, int], ...]:
    """The sizes that are cut into shards."""
    first = "k" if gather_axis == "k" else "m"
    return (first, sizes[first], devices), ("n", sizes["n"], devices)
