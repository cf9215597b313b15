"""Estimated times of a matmul alone on one device: by a kernel's tiles, and by XLA.

The constants were fitted to random sizes on 2 H200s (docs/measure/never_slower.md).
"""

from __future__ import annotations

import math

from stretto.distributed.schedule import ceil_div

TILE_M, TILE_N, TILE_K = 128, 256, 64
STEP_US = 0.7  # of a block, for one step of TILE_K along k
WIDTHS = {64: (0.21, 0.42, 0.6), 128: (0.30, 0.43, 1.2), TILE_N: (0.56, 0.69, 2.4)}
"""Of tiles of so many columns, in microseconds: a step where the device has next to no other tiles,
one where each multiprocessor has a tile and all share the L2, and what it takes to begin a tile and
to store it. Fitted to own matmuls alone at 60 random sizes on one H200."""
MEMORY_BYTES = 2.4e12  # per second, read and written by XLA's transposes
XLA_TILE = 128
XLA_STEP_US, XLA_STEP_OF_WHOLE_TILE_US = 0.056, 0.317
"""Of XLA's tile, for one step of TILE_K along k: of any, and in proportion to the side of a smaller
one."""
XLA_STORING_US = 0.8  # of a wave of whole tiles after the first, besides its steps
READ_BYTES, FILLED_BYTES, SUMMED_BYTES = 2.1e12, 4.7e12, 5.0e12
"""Per second: operands that a matmul reads, those that it fills up first, and parts of its
result that it adds."""
DIVIDED_READ_BYTES = 3.4e12
"""The same of a product that XLA divides along k: more multiprocessors read. Seen at one size, a
reduce-scatter of 11312 x 11712 x 8, where the fused kernel's 89 tiles took 1.4 of XLA's time."""
UNALIGNED_WRITTEN_BYTES, OUTER_BYTES = 2.7e12, 0.85e12
"""Per second: what the L2 does not keep of a result beside rows that are not aligned, which is
written after the products; and the result of an outer product, which is no matmul, where its own
rows are not aligned. Fitted to XLA's matmuls alone at 110 random sizes on one H200."""
CACHED_BYTES, WRITTEN_BYTES = 30e6, 3.3e12  # of a result: what stays in the L2; per second beyond
MOST_PARTS = 2048  # of a product that XLA divides along k
SUM_COST, SUM_COST_OF_A_BYTE = 401e3, 2.28  # of its partial products, in operations of one tile
COST_OF_A_BYTE = 1.94e-3  # of operands and products; this and the two above as XLA has them
ALIGNED_BYTES = 16  # of each part's share of k, to which XLA fills up both operands
LEAST_ELEMENTS = 100
"""Of both operands, of a product that XLA generates code for; smaller ones are cuBLAS's."""
UNALIGNED_US = {8: 0.0089, 4: 0.016, 2: 0.0205, 1: 0.0205}
"""Of XLA's matmul for each k of a tile, by the bytes of which rows of its operands are multiples.
8: 1.49, 1.60 and 1.50 of the time with multiples of 16, seen beside 1000 x 3072 x 4100, 4096 x 8192
x 4100 and 2048 x 4096 x 4100."""


def by_tiles(m: int, k: int, n: int, multiprocessors: int, matrices: int = 1) -> tuple[float, int]:
    """(microseconds, waves of tiles) of matmuls by large tiles, each `[m, k] @ [k, n]`."""
    tiles = matrices * ceil_div(m, TILE_M) * ceil_div(n, TILE_N)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, TILE_K) * STEP_US, waves


def by_best_tiles(
    m: int, k: int, n: int, multiprocessors: int, least_columns: int
) -> tuple[float, int]:
    """(microseconds, waves) by the tiles of `least_columns` or more whose waves take least time.

    Launches have what a first wave takes besides its products.
    The default configurations of kernels have such tiles, too.
    """

    def by(tile_n: int, alone_us: float, full_us: float, storing_us: float) -> tuple[float, int]:
        tiles = ceil_div(m, TILE_M) * ceil_div(n, tile_n)
        waves = ceil_div(tiles, multiprocessors)
        busy = tiles / multiprocessors - (waves - 1)  # The share of a device, in the last wave.
        step_us = (waves - 1) * full_us + alone_us + (full_us - alone_us) * busy
        return step_us * ceil_div(k, TILE_K) + (waves - 1) * storing_us, waves

    return min(by(tile_n, *us) for tile_n, us in WIDTHS.items() if tile_n >= least_columns)


def by_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul of one matrix, its launches apart.

    That of `by_xla_unstored`; and the result, where rows are not aligned.
    """
    if min(m, n) == 1 or is_aligned(k, n, itemsize):
        return by_xla_unstored(m, k, n, itemsize, multiprocessors)
    result = 1e6 * itemsize * m * n
    if k == 1 and n * itemsize % ALIGNED_BYTES:
        return result / OUTER_BYTES
    others_us = by_xla_unstored(m, k, n, itemsize, multiprocessors)
    return others_us + max(0.0, result - 1e6 * CACHED_BYTES) / UNALIGNED_WRITTEN_BYTES


def is_aligned(k: int, n: int, itemsize: int) -> bool:
    """Whether rows of both operands, of k and of n numbers, are multiples of 16 bytes."""
    return not k * itemsize % ALIGNED_BYTES and not n * itemsize % ALIGNED_BYTES


def by_xla_unstored(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul without its launches and stores beside unaligned rows.

    The longest of its tiles, what it reads, and rows that are not aligned; and what it takes to
    fill up operands and to add the parts of a product that is divided along k.
    """
    parts = _parts(m, k, n, itemsize, multiprocessors)
    filled = parts > 1 and k * itemsize % (parts * ALIGNED_BYTES) > 0
    share = min(m, XLA_TILE) * min(n, XLA_TILE) / XLA_TILE**2
    tiles = parts * ceil_div(m, XLA_TILE) * ceil_div(n, XLA_TILE)
    waves, of_a_part = ceil_div(tiles, multiprocessors), ceil_div(k, parts)
    step_us = XLA_STEP_US + XLA_STEP_OF_WHOLE_TILE_US * share**0.5
    tiles_us = waves * ceil_div(of_a_part, TILE_K) * step_us
    operands = itemsize * k * (m + n)
    moved_us = 1e6 * operands / (READ_BYTES if parts == 1 else DIVIDED_READ_BYTES)
    if is_aligned(k, n, itemsize):
        tiles_us += (waves - 1) * XLA_STORING_US * share**0.5
        moved_us += written(m, n, itemsize)
    sizes = (n,) if filled else (k, n)
    unaligned_us = waves * of_a_part * share**0.5 * _unaligned_step_us(sizes, n, itemsize)
    besides = 2 * operands / FILLED_BYTES if filled else 0.0
    if parts > 1:
        besides += 4 * parts * m * n / SUMMED_BYTES
    return max(tiles_us, moved_us, unaligned_us) + 1e6 * besides


def launches_of_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> int:
    """How many kernels XLA launches for a matmul (JAX 0.11.2, without a timing of variants).

    One; of a product that is divided along k, another that adds the parts, and two that fill up the
    operands where k is not a multiple of aligned parts. Right for 321 of 321 sizes of programs
    that were compiled for an H100, of which 100 were held out.
    """
    parts = _parts(m, k, n, itemsize, multiprocessors)
    if parts == 1:
        return 1
    return 2 if k * itemsize % (parts * ALIGNED_BYTES) == 0 else 4


def is_tiny(m: int, k: int, n: int) -> bool:
    """Whether XLA leaves a product to cuBLAS (JAX 0.11.2), with two kernels that fill up operands
    and one that rounds.

    So have programs it that were compiled for an H100. A vector's product is none.
    """
    return min(m, n) > 1 and k * (m + n) < LEAST_ELEMENTS


def _parts(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> int:
    """Into how many parts along k XLA divides a matmul: the power of two that it reckons best."""

    def cost(parts: int) -> float:
        rows, columns = min(m, XLA_TILE), min(n, XLA_TILE)
        tiles = parts * ceil_div(m, XLA_TILE) * ceil_div(n, XLA_TILE)
        waves = max(1.0, tiles * rows * columns / (multiprocessors * XLA_TILE**2))
        of_tiles = 2.0 * rows * columns * ceil_div(k, parts) * waves
        products_bytes = parts * m * n * (itemsize if parts == 1 else 4)
        of_memory = COST_OF_A_BYTE * (itemsize * k * (m + n) + products_bytes)
        if parts == 1:
            return max(of_tiles, of_memory)
        summed = SUM_COST + SUM_COST_OF_A_BYTE * (products_bytes + m * n * itemsize)
        return max(of_tiles, of_memory) + summed

    return min((2**power for power in range(MOST_PARTS.bit_length())), key=cost)


def moved(m: int, k: int, n: int, itemsize: int) -> float:
    """Microseconds to read the operands, and to write the result."""
    return 1e6 * itemsize * k * (m + n) / READ_BYTES + written(m, n, itemsize)


def written(m: int, n: int, itemsize: int) -> float:
    """Microseconds in which a result is written to memory, of what the L2 does not keep."""
    return 1e6 * max(0.0, itemsize * m * n - CACHED_BYTES) / WRITTEN_BYTES


def unaligned(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul by what it takes where rows are no multiples of 16 bytes.

    0 where they are, and of a vector, which is no matmul.
    """
    parts = _parts(m, k, n, itemsize, multiprocessors)
    tiles = parts * ceil_div(m, XLA_TILE) * ceil_div(n, XLA_TILE)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, parts) * _unaligned_step_us((k, n), n, itemsize)


def _unaligned_step_us(sizes: tuple[int, ...], n: int, itemsize: int) -> float:
    """Microseconds for each k of a tile; 0 where rows of these `sizes` are aligned."""
    if n == 1:
        return 0.0
    return UNALIGNED_US.get(math.gcd(ALIGNED_BYTES, *(size * itemsize for size in sizes)), 0.0)
