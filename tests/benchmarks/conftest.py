"""Results with plausible times, so that what is made of them needs no GPU."""

from __future__ import annotations

import copy
import functools
import random

import pytest

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import shapes_of
from stretto.benchmarks.measurements import figures
from stretto.benchmarks.measurements.results import SCHEMA, Machine, Missing, Results, Timed
from stretto.benchmarks.measurements.spread import spread
from stretto.benchmarks.peers.peers import PEERS
from stretto.kernels.operations import OPERATIONS

# Over the floor.
_PACE = {
    "fused": 1.04,
    "auto": 1.05,
    "xla": 1.8,
    "xla-windowed": 3.2,
    "jax-pallas": 1.2,
    "torch": 1.85,
    "torch-symm": 1.7,
    "own-matmul": 1.03,
}


def _times(case: Case, rng: random.Random) -> dict[str, float]:
    matmul = case.work.flops / 760e6
    link = case.work.sent_bytes / 350e3
    floor = max(matmul, link)
    times = {name: floor * pace + 5 for name, pace in _PACE.items()}
    if case.work.flops:
        times |= {"matmul": matmul, "communication": link * 1.1 + 5}
        times["own-matmul"] = matmul * 1.03
    return {name: time * rng.uniform(0.99, 1.01) for name, time in times.items()}


def measurement_of(operation, sizes, devices: int, rng: random.Random, slower: float = 1.0):
    case = Case(operation=operation, sizes=sizes, dtype="bfloat16", devices=devices)
    measurement = figures.begin(case, 1)
    for name, time in _times(case, rng).items():
        peer = PEERS[name]
        if (not case.work.flops and name in ("own-matmul", "xla-windowed", "jax-pallas")) or (
            case.devices == 1 and name not in ("fused", "xla", "matmul", "own-matmul")
        ):
            measurement.missing.append(Missing(peer=name, reason="there is no such thing here"))
            continue
        time *= slower if name == "fused" else 1.0
        samples = [round(time * rng.uniform(0.995, 1.005), 3) for _ in range(20)]
        times = spread(samples)
        measurement.timed.append(
            Timed(
                peer=name,
                role=peer.role,
                time=times.median,
                time_p10=times.p10,
                time_p90=times.p90,
                samples=samples,
                calls=20,
            )
        )
    figures.complete(measurement, case, 350.0)
    return measurement


@pytest.fixture(scope="session")
def make_results():
    """A function of (`slower`, `speed`, `kernels`) that makes results on 1, 2 and 4 devices."""

    @functools.cache
    def made(slower: float, speed: bool, kernels: tuple[str, ...]) -> Results:
        rng = random.Random(0)
        measurements = [
            measurement_of(operation, sizes, devices, rng, slower)
            for operation in map(OPERATIONS.__getitem__, kernels)
            for devices in (1, 2, 4)
            for sizes in shapes_of("goals", operation, devices)
            if devices > 1 or len(sizes) > 2
        ]
        return Results(
            schema=SCHEMA,
            start_time="2026-01-02T03:04:05+00:00",
            command=["stretto", "bench", "all"],
            machine=Machine(
                card="NVIDIA H100 80GB HBM3" if speed else "CPU (x86_64)",
                platform="gpu" if speed else "cpu",
                num_devices=4,
                num_processes=1,
                layout="one process",
                num_hosts=1,
                driver="580.1",
                versions={"jax": "0.11.2", "nvidia-nccl-cu13": "2.29.2"},
                commit="0123456789ab",
            ),
            measurement_of_speed=speed,
            link_gb_per_s=350.0,
            measurements=measurements,
        )

    def make(slower: float = 1.0, speed: bool = True, kernels=tuple(OPERATIONS)) -> Results:
        return copy.deepcopy(made(slower, speed, tuple(kernels)))

    return make
