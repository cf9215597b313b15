"""Times estimated from an operation's work on a device, for problems without a tuned table.

The rates were measured on 4 H100s of one NVLink domain. The estimates of the fused kernels are
pessimistic: XLA serves a call unless the fused kernel is clearly faster.
"""

from __future__ import annotations

from typing import Any

from stretto.distributed.schedule import ceil_div
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.work import Work

TILE_M, TILE_N, TILE_K = 128, 256, 64
STEP_US = 0.7  # of a block, for one step of TILE_K along k
FUSED_BYTES = 245e9  # per second, sent by one device beside a matmul
XLA_BYTES = 270e9  # per second, NCCL alone
ATTENTION_FLOPS = 550e12  # per second, of cuDNN's attention forward on an H200
MEMORY_BYTES = 2.4e12  # per second, read and written by XLA's transposes
ROW_BYTES = 16  # of which rows are a multiple that a kernel takes as they are
COPY_LAUNCH_US = 4.0  # of a kernel of XLA's that copies an operand or a result
UNALIGNED_ROW_BYTES = 8  # XLA's matmul is slow where rows of its operands are no multiples of it
UNALIGNED_TILE, UNALIGNED_FROM_US = 128, 150.0  # Shorter ones differ too much to be known.
UNALIGNED_US = {True: 0.017, False: 0.025}  # for one step of k of a tile; rows of words, or not
# What follows was fitted to 142 random sizes on 2 H200s. It serves where a table has collectives.
NARROW_STEP_US = {64: 0.27, 128: 0.42}  # for a step of TILE_K, where no block has two such tiles
LEAST_COLUMNS_OF_SUMS = 128
MOST_DEVICES = 2  # of which what follows is known
LAUNCH_BESIDE_US = dict(all_gather=3.0, reduce_scatter=6.0, all_reduce=16.0)  # of a matmul's kernel
PRODUCT_LAUNCH_US = 3.5  # of XLA's matmul
LEAST_SHARE = 0.15  # of a whole matmul's time that XLA's takes at least, divided along k
PIECE, PIECE_US = (16, 256), 4.0  # rows and columns that a kernel pulls at once
FUSED_LAUNCH_US = 25.0
MARGIN = 0.1  # by which a kernel must be faster where nothing was measured
XLA_LAUNCH_US = 12.0


def matmul(m: int, k: int, n: int, multiprocessors: int, matrices: int = 1) -> tuple[float, int]:
    """(microseconds, waves of tiles) of matmuls on one device, each `[m, k] @ [k, n]`."""
    tiles = matrices * ceil_div(m, TILE_M) * ceil_div(n, TILE_N)
    waves = ceil_div(tiles, multiprocessors)
    return waves * ceil_div(k, TILE_K) * STEP_US, waves


def unaligned_matmul(m: int, k: int, n: int, itemsize: int, multiprocessors: int) -> float:
    """The least microseconds of XLA's matmul on one device; 0 where they are not known.

    That is where rows are multiples of 8 bytes, and where it is short.

    Fitted to 2 H200s: 6610 x 6398 x 2442 took some 900 us, 1203 x 4111 x 5242 some 430.
    """
    if not any(size * itemsize % UNALIGNED_ROW_BYTES for size in (k, n)):
        return 0.0
    tiles = ceil_div(m, UNALIGNED_TILE) * ceil_div(n, UNALIGNED_TILE)
    waves = ceil_div(tiles, multiprocessors)
    if tiles < multiprocessors:  # Each is divided along k.
        waves = tiles / multiprocessors
    in_words = not any(size * itemsize % 4 for size in (k, n))
    us = waves * k * UNALIGNED_US[in_words]
    return us if us >= UNALIGNED_FROM_US else 0.0


def estimate(
    work: Work, machine: Machine, measured: tuple[float, float] | None = None
) -> tuple[float, float]:
    """(fused, XLA unfused) times in microseconds of a matmul with a collective.

    A kernel hides what it sends under all waves of its tiles but one; XLA hides nothing.
    `measured` are microseconds, where a table has them: of the collective's kernel where it sends
    next to nothing, and of XLA's collective.
    """
    if work.product is None and work.attention:
        return _attention(work)
    if work.product is None:
        raise ValueError("only operations with a matmul have an estimate.")
    compute, waves = matmul(*work.product, machine.multiprocessors)
    unhidden = 1e6 * work.sent_bytes / FUSED_BYTES
    by_xla, waves_of_all = matmul(*work.product, machine.multiprocessors, work.matrices)
    if measured is None or work.traffic is None or work.traffic.devices > MOST_DEVICES:
        launch_us = FUSED_LAUNCH_US
        sent_by_xla = 1e6 * work.sent_bytes / XLA_BYTES + XLA_LAUNCH_US
    else:
        launch_us, sent_by_xla = measured
        launch_us += LAUNCH_BESIDE_US[work.traffic.collective]
        compute, waves = _of_narrow_tiles(work, machine) or (compute, waves)
        unhidden = max(unhidden, _pieces_us(work, machine))
        sent_by_xla += PRODUCT_LAUNCH_US
        if waves_of_all == 1:  # Few tiles are divided along k.
            tiles = ceil_div(work.product[0], TILE_M) * ceil_div(work.product[2], TILE_N)
            by_xla *= max(LEAST_SHARE, tiles / machine.multiprocessors)
    fused = compute + max(0.0, unhidden - compute * (waves - 1) / waves) + launch_us
    itemsize = work.traffic.itemsize if work.traffic is not None else 2
    # XLA multiplies all rows by the matrix of every group (`ragged_dot`, JAX 0.11.2).
    slow = unaligned_matmul(*work.product, itemsize, machine.multiprocessors)
    return fused, max(by_xla, slow) + sent_by_xla


def _of_narrow_tiles(work: Work, machine: Machine) -> tuple[float, int] | None:
    """(microseconds, waves) of a kernel's narrower tiles; None of more than one wave."""
    m, k, n = work.product or (0, 0, 0)
    for tile_n, step_us in NARROW_STEP_US.items():
        is_sum = work.traffic is not None and not work.traffic.gathers
        if is_sum and tile_n < LEAST_COLUMNS_OF_SUMS:
            continue
        if ceil_div(m, TILE_M) * ceil_div(n, tile_n) <= machine.multiprocessors:
            return ceil_div(k, TILE_K) * step_us, 1
    return None


def _pieces_us(work: Work, machine: Machine) -> float:
    """Microseconds in which each block pulls its pieces of a gather, one after another."""
    if work.traffic is None or not work.traffic.gathers:
        return 0.0
    rows, columns = work.traffic.shape
    pieces = (work.traffic.devices - 1) * ceil_div(rows, PIECE[0]) * ceil_div(columns, PIECE[1])
    return PIECE_US * (ceil_div(pieces, machine.multiprocessors) - 1)


def _attention(work: Work) -> tuple[float, float]:
    """The same of attention: half of what is sent is hidden, or nothing."""
    compute, sent = work.attention / ATTENTION_FLOPS * 1e6, sent_by_xla_us(work.sent_bytes)
    return compute + sent / 2 + FUSED_LAUNCH_US, compute + sent + XLA_LAUNCH_US


def attention_us(pairs: float) -> float:
    """Microseconds of attention by cuDNN, of so many products of a query's and a key's number."""
    return 1e6 * 4 * pairs / ATTENTION_FLOPS


def sent_by_xla_us(sent: float) -> float:
    """Microseconds in which one device sends so many bytes by XLA's collectives."""
    return 1e6 * sent / XLA_BYTES


def copies_launches_us(work: Work, itemsize: int) -> float:
    """Microseconds of the launches that copy a matmul's operands and result to aligned rows.

    Rows of lhs, of rhs and of the result that are no multiples of 16 bytes are copied.
    """
    if work.product is None:
        return 0.0
    _, k, n = work.product
    columns = k if work.traffic is None else min(k, work.traffic.shape[1])
    is_lhs, is_rhs = (size * itemsize % ROW_BYTES > 0 for size in (columns, n))
    return COPY_LAUNCH_US * (is_lhs + (is_lhs or is_rhs) + is_rhs)


def copies_us(copied: int) -> float:
    """Microseconds in which XLA copies an operand and a result, of so many bytes together."""
    return moved_in_memory_us(copied) + 2 * COPY_LAUNCH_US


def moved_in_memory_us(moved: int) -> float:
    """Microseconds in which XLA reads and writes so many bytes, as by a transpose."""
    return 1e6 * 2 * moved / MEMORY_BYTES


def compare(times: tuple[float, float], margin: float = MARGIN) -> dict[str, Any]:
    """What an estimate, (fused, XLA) in microseconds, says: fields of a `Choice`.

    The fused kernel must be faster by `margin`, a share.
    """
    fused_us, xla_us = times
    backend = "pallas" if fused_us < (1 - margin) * xla_us else "xla"
    return dict(
        backend=backend, reason="it is estimated to be faster", fused_us=fused_us, xla_us=xla_us
    )


def by_size(fused_from: int, work: Work) -> dict[str, Any]:
    """What the size of a collective's operand says: fields of a `Choice`."""
    limit = f"{fused_from / 2**20:g} MiB"
    if operand_bytes(work) < fused_from:
        return dict(backend="xla", reason=f"XLA is faster for operands below {limit}")
    reason = f"the fused kernel is faster for operands of {limit} or more"
    return dict(backend="pallas", reason=reason)


def operand_bytes(work: Work) -> int:
    """Bytes of one device's operand of a collective."""
    if work.traffic is None:
        raise ValueError("only operations that communicate are chosen by what they send.")
    rows, columns = work.traffic.shape
    return rows * columns * work.traffic.itemsize
