"""Estimated times of a matmul alone on one device: by a kernel's tiles, and by XLA.

The constants were fitted to random sizes on 2 H200s (docs/measure/never_slower.md).
"""

from __future__ import annotations

import math

import numpy as np

from stretto.distributed.schedule import ceil_div

TILE_M, TILE_N, TILE_K = 128, 256, 64
STEP_US = 0.7  # of a block, for one step of TILE_K along k
WIDTHS = {64: (0.18, 0.6, 0.7), 128: (0.325, 0.47, 1.8), TILE_N: (0.67, 0.67, 3.0)}
"""Of tiles of so many columns, in microseconds: a step where the device has next to no other tiles,
one where each multiprocessor has a tile and all share the L2, and what it takes to begin a tile and
to store it."""
MEMORY_BYTES = 2.4e12  # per second, read and written by XLA's transposes
READ_BYTES = 2.5e12  # per second, of operands, by a kernel
XLA_TILE, XLA_KERNEL_US, XLA_TILE_US, XLA_STEP_US = 128, 1.4, 1.3, 0.39
"""Of XLA's matmul: rows and columns of a tile, and microseconds of a kernel, of a wave of tiles,
and of one step of TILE_K along k. Smaller tiles take less in proportion to their side."""
XLA_READ_BYTES, DIVIDED_READ_BYTES, STORED_BYTES = 1.5e12, 3.2e12, 2.5e12
"""Per second: operands that XLA's matmul reads, more of a product that it divides along k, since
more multiprocessors read; and its result."""
FILLING_US, FILLED_BYTES, SUMMED_BYTES = 1.5, 3.0e12, 1.6e12
"""To fill operands up, and per second, read and written; parts of a result that are added."""
OUTER_BYTES = 0.85e12
"""Per second: the result of an outer product, which is no matmul, where rows are not aligned."""
CACHED_BYTES, WRITTEN_BYTES = 30e6, 3.3e12  # of a result: what stays in the L2; per second beyond
MOST_PARTS = 2048  # of a product that XLA divides along k
SUM_COST, SUM_COST_OF_A_BYTE = 401e3, 2.28  # of its partial products, in operations of one tile
COST_OF_A_BYTE = 1.94e-3  # of operands and products; this and the two above as XLA has them
ALIGNED_BYTES = 16  # of each part's share of k, to which XLA fills up both operands
LEAST_ELEMENTS = 100
"""Of both operands, of a product that XLA generates code for; smaller ones are cuBLAS's."""
UNALIGNED_US = {8: 0.0125, 4: 0.018, 2: 0.024, 1: 0.024}
"""Of XLA's matmul for each k of a tile, by the bytes of which rows of its operands are multiples.
8: 0.0089 at three sizes (beside 1000 x 3072 x 4100, 4096 x 8192 x 4100, 2048 x 4096 x 4100), 0.0150
and 0.0183 at two others (9988 x 3020 x 5344, 404 x 10904 x 3724)."""


def by_tiles(m: int, k: int, n: int, multiprocessors: int, matrices: int = 1) -> tuple[float, int]:
    """(microseconds, waves of tiles) of matmuls by large tiles, each `[m, k] @ [k, n]`."""
    tiles = matrices * ceil_div(m, TILE_M) * ceil_div(n, TILE_N)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, TILE_K) * STEP_US, waves


def by_kernel(
    m: int, k: int, n: int, multiprocessors: int, tile: tuple[int, int]
) -> tuple[float, int]:
    """(microseconds, waves) by a kernel's tiles of these (rows, columns).

    Launches have what a first wave takes besides its products. A tile of several times `TILE_M`
    rows is made by as many blocks.
    """

    tile_m, tile_n = tile
    tiles = ceil_div(m, tile_m) * ceil_div(n, tile_n)
    at_once = multiprocessors // (tile_m // TILE_M)
    waves = ceil_div(tiles, at_once)
    busy = tiles / at_once - (waves - 1)  # The share of a device, in the last wave.
    alone_us, full_us, storing_us = _of_width(tile_n)
    step_us = (waves - 1) * full_us + alone_us + (full_us - alone_us) * busy
    return step_us * ceil_div(k, TILE_K) + (waves - 1) * storing_us, waves


def _of_width(tile_n: int) -> tuple[float, ...]:
    """`WIDTHS` of tiles of so many columns, between those that were fitted."""
    known = sorted(WIDTHS)
    times = zip(*(WIDTHS[width] for width in known), strict=True)
    return tuple(float(np.interp(tile_n, known, us)) for us in times)


def by_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of XLA's matmul of one matrix, alone on a device.

    The longer of its tiles and of what it reads and writes; and before it, of a product that is
    divided along k in parts that are not aligned, what fills up both operands. The result of an
    outer product, which is no matmul, where its rows are not aligned.
    """
    result, operands = 1e6 * itemsize * m * n, 1e6 * itemsize * k * (m + n)
    if k == 1 and min(m, n) > 1 and n * itemsize % ALIGNED_BYTES:
        return result / OUTER_BYTES
    parts = parts_of_xla(m, k, n, itemsize, multiprocessors)
    of_a_part, is_filled = ceil_div(k, parts), parts > 1 and k * itemsize % (parts * ALIGNED_BYTES)
    whole = (min(m, XLA_TILE) * min(n, XLA_TILE) / XLA_TILE**2) ** 0.5
    waves = ceil_div(parts * ceil_div(m, XLA_TILE) * ceil_div(n, XLA_TILE), multiprocessors)
    unaligned_us = _unaligned_step_us((n,) if is_filled else (k, n), n, itemsize)
    steps_us = max(ceil_div(of_a_part, TILE_K) * XLA_STEP_US, of_a_part * unaligned_us)
    tiles_us = waves * whole * (steps_us + XLA_TILE_US)
    read_us = operands / (XLA_READ_BYTES if parts == 1 else DIVIDED_READ_BYTES)
    besides_us = FILLING_US + 2 * operands / FILLED_BYTES if is_filled else 0.0
    if parts > 1:
        besides_us += 1e6 * 4 * parts * m * n / SUMMED_BYTES
    return XLA_KERNEL_US + max(tiles_us, read_us + result / STORED_BYTES) + besides_us


def launches_of_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> int:
    """How many kernels XLA launches for a matmul (JAX 0.11.2, without a timing of variants).

    One; of a product that is divided along k, another that adds the parts, and two that fill up the
    operands where k is not a multiple of aligned parts. Right for 321 of 321 sizes of programs
    that were compiled for an H100, of which 100 were held out.
    """
    parts = parts_of_xla(m, k, n, itemsize, multiprocessors)
    if parts == 1:
        return 1
    return 2 if k * itemsize % (parts * ALIGNED_BYTES) == 0 else 4


def is_tiny(m: int, k: int, n: int) -> bool:
    """Whether XLA leaves a product to cuBLAS (JAX 0.11.2), with two kernels that fill up operands
    and one that rounds.

    So have programs it that were compiled for an H100. No vector's product is, and no outer one.
    """
    return min(m, k, n) > 1 and k * (m + n) < LEAST_ELEMENTS


def parts_of_xla(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> int:
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
    parts = parts_of_xla(m, k, n, itemsize, multiprocessors)
    tiles = parts * ceil_div(m, XLA_TILE) * ceil_div(n, XLA_TILE)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, parts) * _unaligned_step_us((k, n), n, itemsize)


def _unaligned_step_us(sizes: tuple[int, ...], n: int, itemsize: int) -> float:
    """Microseconds for each k of a tile; 0 where rows of these `sizes` are aligned."""
    if n == 1:
        return 0.0
    return UNALIGNED_US.get(aligned_to(sizes, itemsize), 0.0)


def aligned_to(sizes: tuple[int, ...], itemsize: int) -> int:
    """Bytes, up to `ALIGNED_BYTES`, of which rows of so many elements are multiples."""
    return math.gcd(ALIGNED_BYTES, *(size * itemsize for size in sizes))
