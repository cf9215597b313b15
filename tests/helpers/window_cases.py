"""Stores of windows, and what Mosaic GPU makes of them: for the compiler and for the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCKS = 2
TILED = (plgpu.TilingTransform((8, 64)),)  # pyright: ignore[reportAbstractUsage]
SWIZZLED = (*TILED, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclasses.dataclass(frozen=True)
class Case:
    """Each block, `i`, stores `piece` of shared memory to `window(out_ref, i)` of an `array`.

    `flat`: the compiler makes one flat copy of it. `edge`: the dimension over whose edge it may run
    on, None for none.
    """

    array: tuple[int, ...]
    piece: tuple[int, ...]
    window: Callable[[Any, Any], Any]
    flat: bool
    edge: int | None = None
    transforms: tuple = ()
    reduction: str | None = None


def call(cases: Sequence[Case]) -> list[jax.Array]:
    """Launches a kernel that makes these stores, each to an array of its own."""

    def body(*refs):
        outs, pieces = refs[: len(cases)], refs[len(cases) :]
        for case, out, piece in zip(cases, outs, pieces, strict=True):
            window = case.window(out, lax.axis_index("block"))
            plgpu.copy_smem_to_gmem(piece, window, reduction_op=case.reduction)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(case.array, jnp.bfloat16) for case in cases],
        scratch_types=[
            plgpu.SMEM(case.piece, jnp.bfloat16, transforms=case.transforms) for case in cases
        ],
        grid=(BLOCKS,),
        grid_names=("block",),
        kernel_name="store",
    )()


def rows(count):
    """`count` rows of a matrix."""
    return lambda ref, i: ref.at[pl.ds(i * count, count)]


def part_of(rows, columns, part=1):
    """Rows and columns in one of several matrices."""
    return lambda ref, i: ref.at[part, pl.ds(i * rows, rows), pl.ds(i * columns, columns)]


def side_by_side(ref, i):
    """Rows of one of two matrices side by side, as wide as both."""
    return ref.at[:, 1].at[pl.ds(i * 16, 16), pl.ds(i * 256, 256)]


CASES = {
    "whole array": Case((16, 128), (16, 128), lambda ref, i: ref, flat=True),
    "rows that divide": Case((32, 128), (16, 128), rows(16), flat=True),
    "rows over the end of all": Case((24, 128), (16, 128), rows(16), flat=True),
    "rows over the end of a part": Case((3, 24, 128), (16, 128), part_of(16, 128), True, edge=1),
    "rows of the only part": Case((1, 24, 128), (16, 128), part_of(16, 128, part=0), flat=True),
    "rows inside a part": Case(
        (3, 24, 128), (16, 128), lambda ref, i: ref.at[1].at[pl.ds(8, 16)], flat=True
    ),
    "narrower than the rows": Case((3, 24, 128), (16, 64), part_of(16, 64), flat=False),
    "wider than the rows": Case((3, 24, 128), (16, 256), part_of(16, 256), flat=False),
    "side by side": Case((72, 2, 128), (16, 256), side_by_side, True, edge=2),
    "three side by side": Case((72, 3, 128), (16, 256), side_by_side, flat=False),
    "one row": Case((3, 24, 128), (1, 256), part_of(1, 256), True, edge=2),
    "part of a row": Case((24, 128), (64,), lambda ref, i: ref.at[i, pl.ds(64 * i, 64)], flat=True),
    "tiled, as wide as the array": Case(
        (3, 24, 64), (16, 64), part_of(16, 64), True, edge=1, transforms=TILED
    ),
    "tiled, narrower": Case((3, 24, 128), (16, 64), part_of(16, 64), False, transforms=TILED),
    "swizzled": Case((3, 24, 64), (16, 64), part_of(16, 64), flat=False, transforms=SWIZZLED),
    "reducing": Case((3, 24, 128), (16, 128), part_of(16, 128), flat=False, reduction="add"),
}
