"""Estimated times of a matmul alone on one device: by a kernel's tiles, and by XLA.

The constants were fitted to random sizes on 2 H200s (docs/measure/never_slower.md).
"""

from __future__ import annotations

from stretto.distributed.schedule import ceil_div

TILE_M, TILE_N, TILE_K = 128, 256, 64
STEP_US = 0.7  # of a block, for one step of TILE_K along k
NARROW_STEP_US = {64: 0.27, 128: 0.42}  # of tiles of so many columns
MEMORY_BYTES = 2.4e12  # per second, read and written by XLA's transposes
SHARE_POWER = 0.6
"""Tiles that fill a share of a wave are divided along k, and take that share to this power of its
time."""
CACHED_BYTES, WRITTEN_BYTES = 30e6, 1.8e12  # of a result: what stays in the L2; per second beyond
UNALIGNED_ROW_BYTES = 8  # XLA's matmul is slow where rows of its operands are no multiples of it
UNALIGNED_TILE = 128
UNALIGNED_US = {True: 0.017, False: 0.022}  # for one step of k of a tile; rows of words, or not


def by_tiles(m: int, k: int, n: int, multiprocessors: int, matrices: int = 1) -> tuple[float, int]:
    """(microseconds, waves of tiles) of matmuls by large tiles, each `[m, k] @ [k, n]`."""
    tiles = matrices * ceil_div(m, TILE_M) * ceil_div(n, TILE_N)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, TILE_K) * STEP_US, waves


def by_narrow_tiles(
    m: int, k: int, n: int, multiprocessors: int, least_columns: int
) -> tuple[float, int] | None:
    """The same by narrower tiles, of `least_columns` or more; None of more than one wave."""
    for tile_n, step_us in NARROW_STEP_US.items():
        tiles = ceil_div(m, TILE_M) * ceil_div(n, tile_n)
        if tile_n >= least_columns and tiles <= multiprocessors:
            return ceil_div(k, TILE_K) * step_us, 1
    return None


def by_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul of one matrix, its launch apart.

    Tiles that do not fill the device are divided along k.
    """
    us, waves = by_tiles(m, k, n, multiprocessors)
    if waves == 1:
        tiles = ceil_div(m, TILE_M) * ceil_div(n, TILE_N)
        us *= (tiles / multiprocessors) ** SHARE_POWER
    read_us = 1e6 * itemsize * k * (m + n) / MEMORY_BYTES
    unaligned_us = unaligned(m, k, n, itemsize, multiprocessors)
    return max(us, read_us + written(m, n, itemsize), unaligned_us)


def written(m: int, n: int, itemsize: int) -> float:
    """Microseconds in which a result is written to memory, of what the L2 does not keep."""
    return 1e6 * max(0.0, itemsize * m * n - CACHED_BYTES) / WRITTEN_BYTES


def unaligned(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul by what it takes where rows are no multiples of 8 bytes.

    0 where they are, and of a vector, which is no matmul.
    """
    if n == 1 or not any(size * itemsize % UNALIGNED_ROW_BYTES for size in (k, n)):
        return 0.0
    tiles = ceil_div(m, UNALIGNED_TILE) * ceil_div(n, UNALIGNED_TILE)
    waves = ceil_div(tiles, multiprocessors)
    if tiles < multiprocessors:  # Each is divided along k.
        waves = (tiles / multiprocessors) ** SHARE_POWER
    in_words = not any(size * itemsize % 4 for size in (k, n))
    return waves * k * UNALIGNED_US[in_words]
