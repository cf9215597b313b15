"""Estimated times of matmuls of groups of rows on one device, in 16 bits: by a kernel, and by XLA.

The constants were fitted to 56 random sizes on one H200 (docs/measure/never_slower.md): the estimates are
off by 13% (kernel) and 31% (XLA, mostly of two sizes) in the root mean square, where XLA takes 10 us
or more.
"""  # noqa: E501

from __future__ import annotations

from stretto.distributed.schedule import ceil_div
from stretto.kernels.choice import products

LAUNCH_US, XLA_LAUNCH_US = 12.0, 6.0
TILE_N = 128
TILE_US, STEP_US = 2.5, 0.36
"""Of a wave of tiles: apart from its products, and for one step along k."""
MASKED_BYTES = 3.0e12  # per second: XLA writes lhs once for every group, zeros in others' rows
FILLED_US, FILLED_BYTES = 4.5, 3.4e12  # operands that XLA fills up first: launches; per second
XLA_STEP_US, XLA_STEP_OF_WHOLE_TILE_US, XLA_STORING_US = 0.056, 0.317, 0.8
"""Of XLA's tile: for one step of TILE_K along k, of any and in proportion to the side of a smaller
one; and of a wave of whole tiles after the first, besides its steps."""
READ_BYTES, DIVIDED_READ_BYTES, XLA_FILLED_BYTES, SUMMED_BYTES = 2.1e12, 3.4e12, 4.7e12, 5.0e12
"""Per second: operands that are read, more of a product that XLA divides along k; those that it
fills up, in a product without groups; and parts of a result that it adds."""
UNALIGNED_US = {8: 0.0089, 4: 0.016, 2: 0.0205, 1: 0.0205}
"""For each k of a tile, by the bytes of which rows of the operands are multiples."""
ROUNDED_BYTES, SUM_BYTES = 1.8e12, 10  # per second; of an element: stored in float32, and rounded


def by_kernel(m: int, k: int, n: int, groups: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of the kernel: the waves of its tiles, or what it reads.

    Every group may have a row of tiles that is not full. Of a group without rows, as most are of
    few rows, a tile is begun and nothing is read.
    """

    def waves(groups: int) -> int:
        tiles = (ceil_div(m, products.TILE_M) + groups) * ceil_div(n, TILE_N)
        return ceil_div(tiles, multiprocessors)

    used = min(groups, m)
    steps_us = waves(used) * STEP_US * ceil_div(k, products.TILE_K)
    tiles_us = waves(groups) * TILE_US + steps_us
    read_us = 1e6 * itemsize * k * (m + used * n) / READ_BYTES
    return LAUNCH_US + max(tiles_us, read_us)


def by_xla(m: int, k: int, n: int, groups: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of `lax.ragged_dot` (JAX 0.11.2).

    It is one matmul of `[m, groups * k]`, lhs masked for each group, by all matrices one below the
    other; its result is in float32, and rounded by another kernel.
    """
    whole_us = _product_us(m, groups * k, n, itemsize, multiprocessors)
    if products.launches_of_xla(m, groups * k, n, itemsize, multiprocessors) > 2:
        # What fills up the operands masks lhs, too.
        filled = 2e6 * itemsize * groups * k * (m + n)
        besides_us = FILLED_US + filled * (1 / FILLED_BYTES - 1 / XLA_FILLED_BYTES)
    else:
        besides_us = 1e6 * itemsize * m * groups * k / MASKED_BYTES
    rounded = max(0.0, SUM_BYTES * m * n - products.CACHED_BYTES)
    return XLA_LAUNCH_US + whole_us + besides_us + 1e6 * rounded / ROUNDED_BYTES


def _product_us(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of the one matmul, without its launches.

    The longest of its tiles, what it reads, and rows that are not aligned; and what it takes to
    fill up operands and to add the parts of a product that is divided along k.
    """
    parts = products.parts_of_xla(m, k, n, itemsize, multiprocessors)
    filled = parts > 1 and k * itemsize % (parts * products.ALIGNED_BYTES) > 0
    share = min(m, products.XLA_TILE) * min(n, products.XLA_TILE) / products.XLA_TILE**2
    tiles = parts * ceil_div(m, products.XLA_TILE) * ceil_div(n, products.XLA_TILE)
    waves, of_a_part = ceil_div(tiles, multiprocessors), ceil_div(k, parts)
    step_us = XLA_STEP_US + XLA_STEP_OF_WHOLE_TILE_US * share**0.5
    tiles_us = waves * ceil_div(of_a_part, products.TILE_K) * step_us
    operands = itemsize * k * (m + n)
    moved_us = 1e6 * operands / (READ_BYTES if parts == 1 else DIVIDED_READ_BYTES)
    if k * itemsize % products.ALIGNED_BYTES == 0 == n * itemsize % products.ALIGNED_BYTES:
        tiles_us += (waves - 1) * XLA_STORING_US * share**0.5
        moved_us += products.written(m, n, itemsize)
    sizes = (n,) if filled else (k, n)
    unaligned = 0.0 if n == 1 else UNALIGNED_US.get(products.aligned_to(sizes, itemsize), 0.0)
    besides = 2 * operands / XLA_FILLED_BYTES if filled else 0.0
    if parts > 1:
        besides += 4 * parts * m * n / SUMMED_BYTES
    return max(tiles_us, moved_us, waves * of_a_part * share**0.5 * unaligned) + 1e6 * besides
