"""Tables that share blocks of keys out, so that all have equal work in attention's derivative."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from stretto.distributed.schedule import Int, div
from stretto.kernels.engine.attention import even_shares
from stretto.kernels.engine.attention.seeing import Seeing
from stretto.kernels.engine.parts import Tile

OF_BLOCK = 3.0
"""What a block of keys takes besides, in tiles of queries: its keys and their derivatives."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """Blocks of keys of all heads of a batch, one head of keys after another.

    Of a head the first keys come first: under a causal mask most queries see these. A block of keys
    waits for those before it (`Seeing`), which therefore have smaller numbers; and every block of
    the grid takes its own in the order of their numbers.

    Attributes:
      batch, chunks, blocks: sequences, chunks of each, blocks of keys in a chunk.
      kv_heads, group: heads of keys, and of queries for each of them. A head of keys counts once
        for each part of its queries' heads that blocks take apart.
      num_blocks: of the grid.
    """

    batch: int
    chunks: int
    blocks: int
    kv_heads: int
    group: int
    num_blocks: int

    @property
    def together(self) -> int:
        """The blocks of a head of keys."""
        return self.chunks * self.blocks

    @property
    def num_tiles(self) -> int:
        """All blocks of keys."""
        return self.batch * self.kv_heads * self.together

    def tile(self, number: Int) -> Tile:
        """The block of keys of this number."""
        of_keys = div(number, self.together)
        batch = div(of_keys, self.kv_heads)
        within = number - of_keys * self.together
        chunk = div(within, self.blocks)
        return Tile(
            batch * self.chunks + chunk,
            within - chunk * self.blocks,
            of_keys - batch * self.kv_heads,
        )


@functools.lru_cache(maxsize=64)
def table(seeing: Seeing, order: BlockOrder) -> np.ndarray:
    """Which blocks of keys each block of the grid derives, as `even_shares.table` has it."""
    each = [
        even_shares.shares(_work(seeing.of_device(device), order), order)
        for device in range(seeing.visible.devices)
    ]
    return even_shares.packed(each, order.num_blocks)


@functools.lru_cache(maxsize=256)
def longest(seeing: Seeing, order: BlockOrder) -> float:
    """What the busiest block of the grid takes on the busiest device, in tiles of queries."""
    found = 0.0
    for device in range(seeing.visible.devices):
        work = _work(seeing.of_device(device), order)
        for share in even_shares.shares(work, order):
            found = max(found, sum(work[number % order.together] for number in share))
    return found


def _work(seeing: Seeing, order: BlockOrder) -> list[float]:
    """What each block of a head of keys takes, in tiles of queries."""
    return [
        OF_BLOCK + order.group * int(seeing.count(chunk, block))
        for chunk in range(order.chunks)
        for block in range(order.blocks)
    ]
