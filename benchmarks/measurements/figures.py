"""From raw times to the figures that are reported: rates, bandwidths, shares, efficiencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.benchmarks.cases import floors, shapes
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.measurements import intervals
from stretto.benchmarks.measurements.results import Measurement, Timed, size_fields
from stretto.benchmarks.measurements.spread import median_ratio
from stretto.benchmarks.peers.peer import COMMUNICATION, MATMUL
from stretto.kernels.operation import Sizes


def begin(case: Case, sets: int, per_visit: int = 1) -> Measurement:
    """A `Measurement` of `case` with nothing timed yet, `per_visit` samples of a peer at once."""
    return Measurement(
        kernel=case.operation.name,
        **size_fields(case.sizes),
        type=case.dtype,
        devices=case.devices,
        values=case.values,
        size=case.size,
        count=case.size // case.itemsize,
        flops=case.work.flops,
        sent_bytes=case.work.sent_bytes,
        sets=sets,
        per_visit=per_visit,
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
            found = measurement.ratio(timed, xla)
            alone = median_ratio(timed.samples, xla.samples)
            timed.over_xla = alone if found is None else found.value
        if measurement.matmul_floor is not None:
            timed.exposed = timed.time - measurement.matmul_floor
            if communication is not None:
                timed.overlap_efficiency = overlap_efficiency(
                    timed.time, measurement.matmul_floor, communication.time
                )
    measurement.lower_floor()
    for timed in measurement.timed:
        if timed.role not in (MATMUL, COMMUNICATION):
            intervals.fill(measurement, timed)


def _rates(timed: Timed, case: Case) -> None:
    work = case.work
    if work.flops and timed.role != COMMUNICATION:
        timed.tflops = work.flops / timed.time / 1e6
    elif work.traffic is not None and case.devices > 1:
        timed.alg_bw = work.traffic.size / timed.time / 1e3
        timed.bus_bw = timed.alg_bw * work.traffic.bus_factor


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


type Scaling = dict[tuple[str, str, str], dict[int, float]]
"""By (kernel, shape on one device, type), the efficiency for each number of devices."""


def strong_efficiencies(measurements: Sequence[Measurement], peer: str) -> Scaling:
    """The strong scaling efficiency of `peer`, of cases that were timed on one device as well."""
    return _efficiencies(
        measurements,
        peer,
        lambda sizes, devices: sizes,
        lambda base, timed, devices: strong_scaling(base.time, timed.time, devices),
    )


def weak_efficiencies(measurements: Sequence[Measurement], peer: str) -> Scaling:
    """The weak scaling efficiency of `peer`, of cases that were timed on one device as well."""
    return _efficiencies(
        measurements,
        peer,
        shapes.scaled,
        lambda base, timed, devices: weak_scaling(base.time, timed.time),
    )


def _efficiencies(
    measurements: Sequence[Measurement],
    peer: str,
    grown: Callable[[Sizes, int], Sizes],
    efficiency: Callable[[Timed, Timed, int], float],
) -> Scaling:
    """Efficiencies, where `grown` says which sizes on so many devices stand beside those on one."""
    found: Scaling = {}
    for one in measurements:
        base = one.of(peer) if one.devices == 1 else None
        if base is None:
            continue
        key = (one.kernel, one.shape, one.type)
        for other in measurements:
            timed = other.of(peer)
            same = (other.kernel, other.type) == (one.kernel, one.type)
            if same and timed is not None and other.sizes == grown(one.sizes, other.devices):
                found.setdefault(key, {})[other.devices] = efficiency(base, timed, other.devices)
    return found
