"""Tables that share tiles of queries out to blocks, so that all have equal work.

Under a causal mask a tile takes as long as it sees blocks of keys. A block that took every C-th
tile had up to twice the mean work: with 2048 tokens a device and 64 heads, 1.9 times.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import numpy as np

from stretto.kernels.engine.attention.order import AttentionOrder, Tiles
from stretto.kernels.engine.attention.visible import VisibleKeys

OF_TILE = 0.7
"""What a tile takes besides, in blocks of keys: its queries, its result, and its first scores."""


@functools.lru_cache(maxsize=64)
def table(visible: VisibleKeys, order: AttentionOrder) -> np.ndarray:
    """Which tiles each block makes, int32 `[devices, rows, order.num_blocks]`.

    In a block's column its number of tiles, and below the numbers of these (`AttentionOrder.tile`)
    in the order in which it makes them. The last row is 0 everywhere.

    Args:
      visible: which keys tiles see; causal.
      order: the tiles.
    """
    each = [
        shares(_work(dataclasses.replace(visible, device=i), order), order)
        for i in range(visible.devices)
    ]
    return packed(each, order.num_blocks)


def packed(each: Sequence[Sequence[Sequence[int]]], num_blocks: int) -> np.ndarray:
    """The table of the shares of each device, by block."""
    most = max(len(tiles) for of_device in each for tiles in of_device)
    found = np.zeros((len(each), most + 2, num_blocks), np.int32)
    for device, of_device in enumerate(each):
        for block, tiles in enumerate(of_device):
            found[device, 0, block] = len(tiles)
            found[device, 1 : len(tiles) + 1, block] = tiles
    return found


def _work(visible: VisibleKeys, order: AttentionOrder) -> list[float]:
    """What each tile of a head of keys takes, in blocks of keys."""
    of_places = {}
    for number in range(0, order.together, order.group):
        tile = order.tile(number)
        of_places[number] = OF_TILE + visible.count(visible.first_query(tile.step, tile.m))
    return [of_places[number - number % order.group] for number in range(order.together)]


def shares(work: Sequence[float], order: Tiles) -> list[list[int]]:
    """The tiles of each block: the next tile goes to the block that would be free first.

    `work` is what each tile of a head of keys takes.

    So keys are wanted one head after another. Of the last heads, with at least a tile for each
    block, tiles that take longest come first, and the short ones fill the gaps at the end.
    """
    count, together = order.num_tiles, order.together
    ordered = max(0, count - order.num_blocks) // together * together
    numbers = [*range(ordered), *sorted(range(ordered, count), key=lambda i: -work[i % together])]
    found: list[list[int]] = [[] for _ in range(order.num_blocks)]
    free = [(0.0, block) for block in range(order.num_blocks)]
    for number in numbers:
        begin, block = free[0]
        found[block].append(number)
        heapq.heapreplace(free, (begin + work[number % together], block))
    return found
