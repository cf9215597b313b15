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
    read_us = 1e6 * itemsize * k * (m + used * n) / products.READ_BYTES
    return LAUNCH_US + max(tiles_us, read_us)


def by_xla(m: int, k: int, n: int, groups: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of `lax.ragged_dot` (JAX 0.11.2).

    It is one matmul of `[m, groups * k]`, lhs masked for each group, by all matrices one below the
    other; its result is in float32, and rounded by another kernel.
    """
    whole_us = products.by_xla_unstored(m, groups * k, n, itemsize, multiprocessors)
    if products.launches_of_xla(m, groups * k, n, itemsize, multiprocessors) > 2:
        # What fills up the operands masks lhs, too.
        filled = 2e6 * itemsize * groups * k * (m + n)
        besides_us = FILLED_US + filled * (1 / FILLED_BYTES - 1 / products.FILLED_BYTES)
    else:
        besides_us = 1e6 * itemsize * m * groups * k / MASKED_BYTES
    rounded = max(0.0, SUM_BYTES * m * n - products.CACHED_BYTES)
    return XLA_LAUNCH_US + whole_us + besides_us + 1e6 * rounded / ROUNDED_BYTES
