"""Estimated times of a matmul with its collective on two devices: by XLA, fused, in two parts.

A call takes what the host needs to launch it, or what the devices need to compute it, whichever is
longer. The constants were fitted to random sizes on 2 H200s (docs/measure/never_slower.md).
"""

from __future__ import annotations

from stretto.distributed.schedule import ceil_div
from stretto.kernels.choice import costs, products
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.work import Traffic, Work

FAST_HOST = 0.72
"""Of the host's times here, those of another host: XLA took 16 to 21 us with seed 12 where it took
23 to 29 with seeds 11 and 41."""
POWER = 6  # of the mean of what is launched and what is computed
RECORDED_FROM = 3  # kernels of one product, which XLA records in a command buffer

# By XLA.
XLA_HOST_US = dict(all_gather=(26.4, 25.7), reduce_scatter=(28.8, 23.3), all_reduce=(23.0, 16.3))
"""In which the host launches XLA's product with the collective: of one kernel, and recorded."""
SECOND_KERNEL_US = 3.3  # that adds the parts of a product, where XLA does not record it
TINY_US = 17.0  # with a product of cuBLAS's
LAUNCHED_US, COMPUTED_US, COMPUTED_MORE = 23.0, 9.8, 4.2
"""A gather or reduce-scatter of XLA's that takes less than `LAUNCHED_US` by itself is limited by
the host. On a device it takes `COMPUTED_US`, and so many times what it takes longer by itself."""
BETWEEN_LAUNCHES_US = 1.8  # of a collective by itself

# Fused.
HOST_US = dict(all_gather=15.6, reduce_scatter=16.6, all_reduce=17.5)
DEVICE_US = dict(all_gather=14.8, reduce_scatter=15.2, all_reduce=14.8)
"""Of a fused kernel: the host's launch, and what a device takes besides tiles and transfers."""
COPIES_HOST_US = {0: 0.0, 2: 8.5, 3: 7.2}
"""The host's launches of the copies of operands and a result, by their number. XLA records three
of one call with those of the next, half of them in a loop of two calls."""
COPIES_DEVICE_US = 2.5  # of a device, besides their bytes
PADDED_BYTES, CUT_BYTES, CUT_BYTES_BY_HALVES = 3.3e12, 2.5e12, 0.73e12
"""Per second, read and written: copies to aligned rows, and out of those, of rows of whole words
and of others."""
SENT_BYTES = dict(all_gather=330e9, reduce_scatter=289e9, all_reduce=252e9)  # per second
ALONG_K_BYTES = 245e9  # of a gather along the contraction, whose rows lie in pieces
HIDDEN_IN_A_WAVE, HIDDEN_ALONG_K = 0.27, 0.1
"""Of the time of a gather's only wave of tiles: they wait for columns, along the contraction for
those of all devices."""
PIECE, PIECE_US, ROWS_US = (16, 256), 3.3, 1.7
"""Rows and columns that a block pulls at once; microseconds of a piece, and of its rows besides. A
gather of 8 or 16 columns for many rows takes 5 us for every 16 rows of a block."""
COLUMN_US = 0.65e-3
"""A sum of one row of tiles takes so much longer for each column: at 16 x 96 x 16360, 11 us."""

# In two parts.
PARTS_HOST_US, WHOLE_PARTS_HOST_US = 22.1, 21.0
"""In which the host launches XLA's product and a kernel for the collective: with copies to whole
rows of what is sent, and without."""
RECORDED_PARTS_HOST_US, RECORDED_SUM_HOST_US = 14.3, 18.1
"""The same of a product that XLA records; of a sum that is copied to whole rows."""
RECORDED_US = 1.6  # of a device, to begin what is recorded
LEAST_TRANSFER_US = 9.6  # of a device
ROWS_BYTES = 1.35e12  # per second, read and written by copies to whole rows


def by_xla(
    work: Work, machine: Machine, collective_us: float, slow_us: float, host: float = 1.0
) -> float:
    """Microseconds of XLA's product and collective.

    Args:
      work: the product, of one device, and the collective.
      machine: whose multiprocessors multiply.
      collective_us: of XLA's collective by itself.
      slow_us: what it takes longer on the devices because of its operand's size.
      host: the host's times, as a share of those here.
    """
    product, traffic = _parts(work, machine)
    alone, recorded = XLA_HOST_US[traffic.collective]
    if products.is_tiny(*product[:3]):
        return TINY_US
    count = launches(work, machine)
    host_us = alone + (SECOND_KERNEL_US if count == 2 else 0.0)
    if count >= RECORDED_FROM:
        host_us = recorded
    transfer_us = collective_us - BETWEEN_LAUNCHES_US
    if traffic.collective != "all_reduce":
        more_us = COMPUTED_MORE * max(0.0, collective_us - LAUNCHED_US)
        transfer_us = min(transfer_us, COMPUTED_US + more_us)
    return longest(host * host_us, transfer_us + slow_us + products.by_xla(*product))


def fused(
    work: Work,
    machine: Machine,
    tile: tuple[int, int],
    copied: int = 0,
    *,
    moved: int = 0,
    is_transposed: bool = False,
    host: float = 1.0,
) -> float:
    """Microseconds of the kernel that hides the transfer, and of the copies before and after it.

    Args:
      work, machine, host: as of `by_xla`.
      tile: rows and columns of the kernel's tiles.
      copied: bytes of operands and a result that are copied because of their rows.
      moved: bytes that are copied besides, such as a result that is transposed.
      is_transposed: whether the kernel multiplies transposed operands.
    """
    (*_, columns, itemsize, _), traffic = _parts(work, machine)
    is_put_in_order = is_transposed and columns * itemsize % costs.ROW_BYTES
    work = work.transposed if is_transposed else work
    product, _ = _parts(work, machine)
    name = traffic.collective
    copies = costs.copies(work, itemsize) if copied else 0
    copies = max(COPIES_HOST_US) if is_put_in_order else copies
    device_us = (
        DEVICE_US[name] + _beside_transfer(work, machine, tile) + costs.moved_in_memory_us(moved)
    )
    if copies:
        device_us += COPIES_DEVICE_US
    if copied:
        device_us += _copied_us(work, itemsize, copied, is_transposed)
    rows, _, columns, *_ = product
    if name == "all_reduce" and rows <= products.TILE_M:
        device_us += COLUMN_US * columns
    return longest(host * (HOST_US[name] + COPIES_HOST_US[copies]), device_us)


def in_two_parts(
    work: Work, machine: Machine, kernel_us: float, *, is_whole: bool, host: float = 1.0
) -> float:
    """Microseconds of XLA's product and the kernel of the collective.

    Args:
      work, machine, host: as of `by_xla`.
      kernel_us: of the kernel by itself, with as many elements.
      is_whole: whether the kernel takes what is sent as it is, without a copy to whole rows.
    """
    product, traffic = _parts(work, machine)
    is_sum = traffic.collective == "all_reduce"
    host_us = WHOLE_PARTS_HOST_US if is_whole else PARTS_HOST_US
    device_us = max(LEAST_TRANSFER_US, kernel_us - BETWEEN_LAUNCHES_US) + products.by_xla(*product)
    if launches(work, machine) >= RECORDED_FROM:
        copied_sum = is_sum and not is_whole
        host_us = RECORDED_SUM_HOST_US if copied_sum else RECORDED_PARTS_HOST_US
        device_us += RECORDED_US
    if not is_whole:
        rows, _, columns, itemsize, _ = product
        copied = 2 * rows * columns * itemsize if is_sum else _copied_to_rows(traffic)
        device_us += 1e6 * copied / ROWS_BYTES
    return longest(host * host_us, device_us)


def launches(work: Work, machine: Machine) -> int:
    """Kernels that XLA launches for the product."""
    product, _ = _parts(work, machine)
    return products.launches_of_xla(*product)


def longest(*us: float) -> float:
    """About the longest of these times, more where several are as long."""
    return sum(one**POWER for one in us) ** (1 / POWER)


def _parts(work: Work, machine: Machine) -> tuple[tuple[int, int, int, int, int], Traffic]:
    """(m, k, n, bytes of an element, multiprocessors) of the product, and the transfer."""
    if work.product is None or work.traffic is None:
        raise ValueError("only a matmul with a collective has such times.")
    return (*work.product, work.traffic.itemsize, machine.multiprocessors), work.traffic


def _copied_us(work: Work, itemsize: int, copied: int, is_transposed: bool) -> float:
    """Microseconds in which XLA copies so many bytes to aligned rows, and cuts a result out.

    A transposed result is cut out where it is put in order.
    """
    cut = min(copied, costs.cut(work, itemsize))
    row_bytes = 0 if work.product is None else work.product[2] * itemsize
    in_words = is_transposed or not row_bytes % costs.WORD_BYTES
    cut_us = 2e6 * cut / (CUT_BYTES if in_words else CUT_BYTES_BY_HALVES)
    return 2e6 * (copied - cut) / PADDED_BYTES + cut_us


def _copied_to_rows(traffic: Traffic) -> float:
    return (2 if traffic.gathers else 3) * traffic.sent_bytes


def _beside_transfer(work: Work, machine: Machine, tile: tuple[int, int]) -> float:
    """Microseconds of a kernel's tiles, and of what they do not hide of the transfer."""
    (*sizes, itemsize, multiprocessors), traffic = _parts(work, machine)
    m, k, n = sizes
    compute, waves = products.by_kernel(m, k, n, multiprocessors, tile)
    compute = max(compute, products.moved(m, k, n, itemsize))
    hidden = (waves - 1) / waves
    sent_us = 1e6 * work.sent_bytes / SENT_BYTES[traffic.collective]
    if traffic.gathers:
        rows, columns = traffic.shape
        in_a_wave = HIDDEN_IN_A_WAVE
        if columns < k:
            sent_us, in_a_wave = 1e6 * work.sent_bytes / ALONG_K_BYTES, HIDDEN_ALONG_K
        groups = (traffic.devices - 1) * ceil_div(rows, PIECE[0])
        pieces = groups * ceil_div(columns, PIECE[1])
        pulled_us = PIECE_US * (ceil_div(pieces, multiprocessors) - 1)
        pulled_us += ROWS_US * (ceil_div(groups, multiprocessors) - 1)
        sent_us = max(sent_us, pulled_us)
        hidden = max(hidden, in_a_wave)
    return compute + max(0.0, sent_us - compute * hidden)
