"""Copies into a stage of the ring: of one block, or of two that fill theirs together.

| barrier | a block of a pair gets |
|---|---|
| `Halves` | half of a window, or all of it, which arrives at the first block's barrier (Blackwell) |
| `OwnRows` | its half of the rows of a window |
| `Shared` | all of a window, of which each block loads half, for both |
"""  # noqa: E501

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS, block_in_cluster
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


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The barrier of a block's own stage, which gets the block's half of a window.

    Attributes:
      barrier: of the stage.
      axis: of the window, along which the first block's half comes first.
    """

    barrier: Ref
    axis: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """The barrier of a block's own stage, which gets all of a window, as the other block's does.

    Each block loads half, and the copy engine writes it to both. So the copies may only start once
    the stage is free in both.
    """

    barrier: Ref


type Arriving = Ref | Halves | OwnRows | Shared


def fill(window: Ref, stage: Ref, barrier: Arriving) -> None:
    """Starts the copy of a window of global memory, or of this block's half of it, to `stage`.

    A stage of one dimension more than the window takes it in columns of tiles (`with_edges`), which
    arrive one by one.
    """
    if isinstance(barrier, Halves):
        _fill_half(window, stage, barrier)
        return
    if isinstance(barrier, OwnRows):
        half = window.shape[barrier.axis] // 2
        own = pl.ds(block_in_cluster() * half, half)
        window, barrier = window.at[(slice(None),) * barrier.axis + (own,)], barrier.barrier
    if len(stage.shape) == len(window.shape):
        copy(window, stage, barrier)
        return
    across, _, columns = stage.shape
    for column in range(across):
        own_columns = window.at[:, pl.ds(column * columns, columns)]
        copy(own_columns, stage.at[column], barrier)


def copy(window: Ref, place: Ref, barrier: Ref | Shared) -> None:
    """Starts one copy of a window of global memory, or this block's half of one for both."""
    if isinstance(barrier, Shared):
        plgpu.copy_gmem_to_smem(window, place, barrier.barrier, collective_axes=CLUSTER_AXIS)
    else:
        plgpu.copy_gmem_to_smem(window, place, barrier)


def _fill_half(window: Ref, stage: Ref, barrier: Halves) -> None:
    """What a block of a pair on Blackwell gets of a window."""
    plgpu.copy_gmem_to_smem(
        window,
        stage,
        barrier.barrier,
        collective_axes=CLUSTER_AXIS,
        leader_tracked=plgpu.CopyPartition.REPLICATED
        if barrier.axis is None
        else plgpu.CopyPartition.PARTITIONED(barrier.axis),
    )
