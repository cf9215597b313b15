"""Times estimated from an operation's work on a device, for problems without a tuned table.

The rates were measured on 4 H100s of one NVLink domain. The estimates of the fused kernels are
pessimistic: XLA serves a call unless the fused kernel is clearly faster.
"""

from __future__ import annotations

from typing import Any

from stretto.kernels.choice import products
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.work import Work

FUSED_BYTES = 245e9  # per second, sent by one device beside a matmul
XLA_BYTES = 270e9  # per second, NCCL alone
ATTENTION_FLOPS = 550e12  # per second, of cuDNN's attention forward on an H200
ROW_BYTES = 16  # of which rows are a multiple that a kernel takes as they are
COPY_LAUNCH_US = 4.0  # of a kernel of XLA's that copies an operand or a result of a collective
COPIES_BESIDE_US = {0: 0.0, 2: 6.0, 3: 4.4}
"""The same of a matmul's, by their number."""
COPY_ALONE_US, COPIED_ALONE = 1.0, 0.75
"""Microseconds of each copy beside a kernel without a collective, which the host launches while the
kernel before runs; and the share of its bytes' time that such copies take. Fitted to groups of rows
at 128 sizes on one H200."""
WORD_BYTES, NOT_IN_WORDS = 4, 1.8  # copies of rows of no words take a collective so much longer
COPIED_BYTES = 3.6e12  # per second, read and written by these
PADDED_BYTES = 3.8e12  # the same of a matmul's operands
CUT_BYTES, CUT_BYTES_BY_WORDS = 1.45e12, 3.3e12
"""The same of its result; of rows of whole words, which are copied as such (`engine/padding.py`).
By words three matmuls with columns of 8200 bytes took 7, 8 and 26 us less, of 8, 8 and 34 MB."""
FUSED_LAUNCH_US = 25.0
MARGIN = 0.1  # by which a kernel must be faster where nothing was measured
XLA_LAUNCH_US = 12.0
UNALIGNED_FROM_US = 150.0  # of XLA's matmul of rows that are not aligned
MOST_DEVICES = 2  # of which `two_devices` knows times


def estimate(work: Work, machine: Machine) -> tuple[float, float]:
    """(fused, XLA unfused) times in microseconds of a matmul with a collective.

    A kernel hides what it sends under all waves of its tiles but one; XLA hides nothing.
    """
    if work.product is None and work.attention:
        return _attention(work)
    if work.product is None:
        raise ValueError("only operations with a matmul have an estimate.")
    compute, waves = products.by_tiles(*work.product, machine.multiprocessors)
    sent_us = 1e6 * work.sent_bytes / FUSED_BYTES
    fused = compute + max(0.0, sent_us - compute * (waves - 1) / waves) + FUSED_LAUNCH_US
    sent_by_xla = 1e6 * work.sent_bytes / XLA_BYTES + XLA_LAUNCH_US
    return fused, _by_xla_in_waves(work, machine) + sent_by_xla


def _by_xla_in_waves(work: Work, machine: Machine) -> float:
    """Microseconds of XLA's matmuls by whole waves of large tiles, of all rows by each matrix.

    XLA multiplies all rows by the matrix of every group (`ragged_dot`, JAX 0.11.2). Rows that are
    not aligned count where they make it long.
    """
    if work.product is None:
        return 0.0
    itemsize = work.traffic.itemsize if work.traffic is not None else 2
    by_tiles, _ = products.by_tiles(*work.product, machine.multiprocessors, work.matrices)
    unaligned = products.unaligned(*work.product, itemsize, machine.multiprocessors)
    return max(by_tiles, unaligned if unaligned >= UNALIGNED_FROM_US else 0.0)


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
    count = copies(work, itemsize)
    if work.traffic is None:
        return COPY_ALONE_US * count
    return COPIES_BESIDE_US[count]


def said_of_copies(copied: int) -> str:
    """What a reason ends with where so many bytes are copied because of the sizes."""
    if not copied:
        return ""
    mib = f"{copied / 2**20:.3g} MiB"
    return f"; rows that are no multiples of 128 bytes cost as much as to copy {mib}"


def copies(work: Work, itemsize: int) -> int:
    """How many of a matmul's operands and its result are copied to aligned rows, at most."""
    is_lhs, is_rhs = (size % ROW_BYTES > 0 for size in _row_bytes(work, itemsize))
    return is_lhs + (is_lhs or is_rhs) + is_rhs


def copies_us(copied: int, row_bytes: int) -> float:
    """Microseconds in which XLA copies so many bytes, a collective's operand and result.

    Or of their launches, if these take longer.
    """
    in_words = not row_bytes % WORD_BYTES
    copied_us = 2e6 * copied / COPIED_BYTES * (1 if in_words else NOT_IN_WORDS)
    return max(copied_us, 2 * COPY_LAUNCH_US)


def copied_for_sizes_us(work: Work, itemsize: int, copied: int) -> float:
    """Microseconds in which XLA copies so many bytes of a matmul to rows that are aligned.

    A result is cut out of aligned rows where its own are not, which takes longer.
    """
    of_result = min(copied, cut(work, itemsize))
    in_words = work.product is not None and not work.product[2] * itemsize % WORD_BYTES
    cut_bytes = CUT_BYTES_BY_WORDS if in_words else CUT_BYTES
    share = 1.0 if work.traffic is not None else COPIED_ALONE
    return share * 2e6 * ((copied - of_result) / PADDED_BYTES + of_result / cut_bytes)


def cut(work: Work, itemsize: int) -> int:
    """Bytes of a device's part of a product that is cut out of one with aligned rows."""
    if work.product is None:
        return 0
    m, _, n = work.product
    if not n * itemsize % ROW_BYTES:
        return 0
    is_scattered = work.traffic is not None and work.traffic.collective == "reduce_scatter"
    return m * n * itemsize // (work.traffic.devices if is_scattered and work.traffic else 1)


def _row_bytes(work: Work, itemsize: int) -> tuple[int, ...]:
    """Bytes of a row of lhs, and of rhs and the result."""
    if work.product is None:
        return ()
    _, k, n = work.product
    gathered = work.traffic if work.traffic is not None and work.traffic.gathers else None
    columns = k if gathered is None else gathered.shape[1]
    return columns * itemsize, n * itemsize


def moved_in_memory_us(moved: int) -> float:
    """Microseconds in which XLA reads and writes so many bytes, as by a transpose."""
    return 1e6 * 2 * moved / products.MEMORY_BYTES


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
