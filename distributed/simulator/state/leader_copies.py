"""Copies into both blocks of a pair that the first of them waits for (`leader_tracked`)."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.state.barriers import BarrierArray
from stretto.distributed.simulator.state.copies import Copy, load_body
from stretto.distributed.simulator.state.engine import Taken
from stretto.distributed.simulator.state.memory import Region


def start_tracked_by_leader(
    task: Any,
    copy: Copy,
    loaded: Taken,
    destination: Region,
    barrier: tuple[BarrierArray, int],
    axes: tuple,
    partition: Any,
) -> None:
    """Starts the copy of one block; the bytes of all of them land on the first block's barrier.

    Args:
      task: who issues it.
      copy: the copy.
      loaded: what all blocks load together, or each of them.
      destination: where the block's own part goes.
      barrier: (barriers of the block, which of them).
      axes: of the cluster, along which the blocks lie.
      partition: `CopyPartition.PARTITIONED(axis)`, or `REPLICATED`.
    """
    machine = task.machine
    blocks = machine.cluster_blocks(task.block, axes)
    array, index = barrier
    tracked = (blocks[0].shared.get(array.key) or machine.allocate(blocks[0], array)).items[index]
    machine.checks.aligned(copy, destination, loaded.region, may_be_flat=False)
    copy.check_commit(destination, writes=True)
    num_bytes = destination.get().nbytes
    if task.block is blocks[0]:
        tracked.expect(len(blocks) * num_bytes)
        tracked.arrive(task, copy.site)
    source, fill, select = loaded.region, loaded.overhang, None
    axis = getattr(partition, "axis", None)
    if axis is not None:
        part = _part(destination.get().shape, axis, blocks.index(task.block))
        if fill is None:
            source = _narrowed(source, part)
        else:  # The parts are of the window, of which only some lies inside the array.
            select = lambda whole: whole[part]  # noqa: E731
    copy.start(load_body(copy, source, fill, [(destination, tracked)], num_bytes, select))
    machine.pending_loads.append(copy)


def _part(shape: tuple[int, ...], axis: int, number: int) -> tuple:
    """The `number`-th part of `shape` along an axis, as an index."""
    size = shape[axis]
    return (slice(None),) * axis + (slice(number * size, (number + 1) * size),)


def _narrowed(region: Region, index: tuple) -> Region:
    base = region.index
    return Region(region.buffer, (*region.steps, lambda array, _: array[base]), index)
