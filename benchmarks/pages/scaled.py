"""Tables of products in 8 bits, for docs/models/fp8.md."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Measurement, Results, Timed, in_order
from stretto.benchmarks.measurements.select import case_order
from stretto.benchmarks.measurements.spread import Interval
from stretto.benchmarks.pages.machines import machine_and_clocks
from stretto.benchmarks.pages.markdown import NONE, microseconds, rows
from stretto.benchmarks.pages.terminal import number, peer_label
from stretto.kernels.operations import SCALED

PEERS = ("xla", "torch", "torch-symm", "matmul")
GRANULARITIES = {"row": "rows", "tensor": "a tensor", "block": "blocks", "mx": "32 elements"}

COLUMNS = """\
Microseconds, with the 10th and 90th percentiles. The share is that of the floor: the larger of
"matmul alone", XLA's product of the same operands without scales, and of the bytes to be sent at
{link:.0f} GB/s. The last two columns are ratios: the time of Stretto's kernel of the same product
in bfloat16 to that in 8 bits, and the kernel's error to XLA's, both beside the product of the same
numbers in float32. Shares are geometric means of pairs of neighbours in time, with 95% intervals;
the ratio to bfloat16, which was timed apart, is one of medians.
"""


def tables(found: Results) -> str:
    """A table for each operation with scales, of all cases of it, and the machine.

    Raises:
      BenchmarkError: there is no such case.
    """
    measurements = sorted(found.measurements, key=case_order)
    scaled = [m for m in measurements if m.kernel in SCALED and m.timed]
    if not scaled:
        raise BenchmarkError("the results hold no products of operands in 8 bits.")
    parts = [f"{machine_and_clocks(found)}.\n", COLUMNS.format(link=found.link_gb_per_s)]
    for name in in_order(_plain(m) for m in scaled):
        cases = [m for m in scaled if _plain(m) == name]
        parts += [f"`{name}`:\n", _table(cases, found.measurements)]
    return "\n".join(parts)


def _plain(one: Measurement) -> str:
    """The name of the same operation without scales."""
    return one.kernel.split("_fp8")[0]


def _table(cases: Sequence[Measurement], every: Sequence[Measurement]) -> str:
    peers = [peer for peer in PEERS if any(one.of(peer) for one in cases)]
    header = ["shape", "scales of", "Stretto", "TFLOP/s", "of floor", *map(peer_label, peers)]
    return rows([*header, "bfloat16", "error"], [_row(m, peers, every) for m in cases], left=2)


def _row(one: Measurement, peers: Sequence[str], every: Sequence[Measurement]) -> list[str]:
    kind = one.values or str(SCALED[one.kernel].examples.scales)
    ours = one.of("fused")
    return [
        one.shape,
        GRANULARITIES[kind],
        _time(ours),
        number(ours.tflops) or NONE if ours else NONE,
        _share(one, ours),
        *(microseconds(one.of(peer)) for peer in peers),
        _over(_of_bfloat16(one, every), ours),
        _error(ours, one.of("xla")),
    ]


def _time(timed: Timed | None) -> str:
    if timed is None:
        return NONE
    return f"{number(timed.time)} [{number(timed.time_p10)}, {number(timed.time_p90)}]"


def _share(one: Measurement, ours: Timed | None) -> str:
    """The floor over the kernel's time; more than 100% where the kernel is faster than XLA's."""
    matmul = one.of("matmul")
    if ours is None or matmul is None:
        return NONE
    if matmul.time < (one.communication_floor or 0.0):
        return f"{100 * (one.communication_floor or 0.0) / ours.time:.0f}%"
    found = one.ratio(matmul, ours)
    return NONE if found is None else _percent(found)


def _percent(found: Interval) -> str:
    return f"{100 * found.value:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _of_bfloat16(one: Measurement, every: Sequence[Measurement]) -> Timed | None:
    """Our kernel of the same product without scales, if it is among the results."""
    for other in every:
        if (other.kernel, other.sizes, other.devices) == (_plain(one), one.sizes, one.devices):
            return other.of("fused")
    return None


def _over(theirs: Timed | None, ours: Timed | None) -> str:
    return NONE if theirs is None or ours is None else f"{theirs.time / ours.time:.2f}"


def _error(ours: Timed | None, xla: Timed | None) -> str:
    """Our error beside float32 over XLA's."""
    if ours is None or xla is None or not ours.float32_error or not xla.float32_error:
        return NONE
    return f"{ours.float32_error / xla.float32_error:.2f}"
