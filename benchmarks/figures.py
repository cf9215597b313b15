"""From raw times to the figures that are reported: rates, bandwidths, shares, efficiencies."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks import floors
from stretto.benchmarks.operations import Case
from stretto.benchmarks.peers import COMMUNICATION, MATMUL
from stretto.benchmarks.results import Measurement, Timed
from stretto.benchmarks.spread import median_ratio


def begin(case: Case, sets: int) -> Measurement:
    """A `Measurement` of `case` with nothing timed yet."""
    return Measurement(
        kernel=case.operation.name,
        m=case.shape.m,
        k=case.shape.k,
        n=case.shape.n,
        type=case.dtype,
        devices=case.devices,
        size=case.size,
        count=case.size // case.itemsize,
        flops=case.flops,
        sent_bytes=case.sent_bytes,
        sets=sets,
        communication_floor=floors.communication_floor(case),
    )


def complete(measurement: Measurement, case: Case, link_gb_per_s: float) -> None:
    """Fills in the floors and every peer's figures from the times in `measurement`."""
    matmuls = [timed.time for timed in measurement.timed if timed.role == MATMUL]
    measurement.matmul_floor = min(matmuls, default=None)
    measurement.communication_floor = floors.communication_floor(case, link_gb_per_s)
    measurement.floor = floors.floor(case, measurement.matmul_floor, link_gb_per_s)
    communication = measurement.of("communication")
    xla = measurement.of("xla")
    for timed in measurement.timed:
        _rates(timed, case)
        if timed.role in (MATMUL, COMMUNICATION):
            continue
        if measurement.floor is not None:
            timed.share_of_floor = measurement.floor / timed.time
        if xla is not None and xla is not timed:
            timed.over_xla = median_ratio(timed.samples, xla.samples)
        if measurement.matmul_floor is not None:
            timed.exposed = timed.time - measurement.matmul_floor
            if communication is not None:
                timed.overlap_efficiency = overlap_efficiency(
                    timed.time, measurement.matmul_floor, communication.time
                )


def _rates(timed: Timed, case: Case) -> None:
    if case.flops and timed.role != COMMUNICATION:
        timed.tflops = case.flops / timed.time / 1e6
    elif case.devices > 1:
        timed.alg_bw = case.size / timed.time / 1e3
        timed.bus_bw = timed.alg_bw * case.bus_factor


def overlap_efficiency(fused_us: float, matmul_us: float, communication_us: float) -> float:
    """Share of the shorter part that was hidden: 1 if all of it, 0 if one followed the other."""
    hidden = matmul_us + communication_us - fused_us
    return hidden / min(matmul_us, communication_us)


def strong_scaling(one_device_us: float, us: float, devices: int) -> float:
    """Efficiency of the same problem on `devices` devices: `t1 / (p tp)`."""
    return one_device_us / (devices * us)


def weak_scaling(one_device_us: float, us: float) -> float:
    """Efficiency of a problem that grows with the devices: `t1 / tp`."""
    return one_device_us / us


def strong_efficiencies(
    measurements: Sequence[Measurement], peer: str
) -> dict[tuple[str, int, int, int, str], dict[int, float]]:
    """By (kernel, m, k, n, type), the strong scaling efficiency of `peer` per device count.

    Only of cases that were timed on one device as well.
    """
    found: dict[tuple[str, int, int, int, str], dict[int, float]] = {}
    for one in measurements:
        base = one.of(peer) if one.devices == 1 else None
        if base is None:
            continue
        for other in measurements:
            timed = other.of(peer)
            if other.key[:5] == one.key[:5] and timed is not None:
                efficiency = strong_scaling(base.time, timed.time, other.devices)
                found.setdefault(one.key[:5], {})[other.devices] = efficiency
    return found


def weak_efficiencies(
    measurements: Sequence[Measurement], peer: str
) -> dict[tuple[str, int, int, int, str], dict[int, float]]:
    """By (kernel, m per device, k, n, type), the weak scaling efficiency of `peer`."""
    found: dict[tuple[str, int, int, int, str], dict[int, float]] = {}
    for one in measurements:
        base = one.of(peer) if one.devices == 1 else None
        if base is None:
            continue
        for other in measurements:
            timed = other.of(peer)
            same = (other.kernel, other.m, other.k, other.n, other.type) == (
                one.kernel,
                one.m * other.devices,
                one.k,
                one.n,
                one.type,
            )
            if same and timed is not None:
                efficiency = weak_scaling(base.time, timed.time)
                found.setdefault(one.key[:5], {})[other.devices] = efficiency
    return found
