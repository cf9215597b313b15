"""Copies into a stage of the ring: of one block, or of two that fill theirs together."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS
from stretto.kernels.engine.parts import Ref


@dataclasses.dataclass(frozen=True)
class Halves:
    """The barrier of a stage that the blocks of a pair fill together, with half a window each.

    Both copies arrive at the first block's barrier, and at no other.

    Attributes:
      barrier: of the stage.
      axis: of the window, along which the first block's half comes first; None if both blocks get
        all of it.
    """

    barrier: Ref
    axis: int | None


def fill(window: Ref, stage: Ref, barrier: Ref | Halves) -> None:
    """Starts the copy of a window of global memory, or of this block's half of it, to `stage`.

    A stage of four dimensions takes the window in tiles of rows and columns, which arrive one by
    one.
    """
    if not isinstance(barrier, Halves) and len(stage.shape) > len(window.shape):
        down, across, rows, columns = stage.shape

        def fill_row(row: jax.Array, _: None) -> None:
            for column in range(across):
                part = window.at[pl.ds(row * rows, rows), pl.ds(column * columns, columns)]
                plgpu.copy_gmem_to_smem(part, stage.at[row, column], barrier)

        lax.fori_loop(0, down, fill_row, None)  # Unrolled it would take more registers.
        return
    if not isinstance(barrier, Halves):
        plgpu.copy_gmem_to_smem(window, stage, barrier)
        return
    plgpu.copy_gmem_to_smem(
        window,
        stage,
        barrier.barrier,
        collective_axes=CLUSTER_AXIS,
        leader_tracked=plgpu.CopyPartition.REPLICATED
        if barrier.axis is None
        else plgpu.CopyPartition.PARTITIONED(barrier.axis),
    )
