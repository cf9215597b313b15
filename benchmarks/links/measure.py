"""Times of transfers between devices, by XLA's `ppermute` inside one `jit`.

So it is NCCL's on GPUs, within a process the platform's own, and gloo's between CPU processes: what
a job's collectives go through. A call sends there and back, each after the other, and the time is
half of it; both ways at once it is the whole. Every process takes part in every transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.benchmarks.links.paths import Path, nodes_of, paths_of
from stretto.benchmarks.measurements import machine
from stretto.benchmarks.measurements.results import Machine
from stretto.benchmarks.timing.timers import LoopTimer, rounds_per_run
from stretto.benchmarks.timing.turns import in_turns

SCHEMA = "stretto-links/1"
AXIS = "device"
SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 128 * 2**20)
CPU_SIZES = (4 * 2**10, 2**20)
SAMPLES = 8
CPU_CALLS = 4


class LinkTime(msgspec.Struct, kw_only=True):
    """One transfer's times.

    Attributes:
      link, path, both_ways, everyone: as in `Path`.
      sizes: bytes that each sender sends.
      us: the median for each size.
      latency_us: of the smallest.
      gb_per_s: of one sender in one direction, of the largest, the latency taken off.
    """

    link: str
    path: str
    both_ways: bool
    everyone: bool
    sizes: list[int]
    us: list[float]
    latency_us: float
    gb_per_s: float


class Links(msgspec.Struct, kw_only=True):
    """All links of a job."""

    schema: str
    machine: Machine
    measurement_of_speed: bool
    nodes: int
    devices_per_node: int
    links: list[LinkTime]


def measure(say: Callable[[str], None] = lambda _: None) -> Links:
    """Times every link of the job; every process must call it.

    Args:
      say: called with a line of progress.

    Raises:
      BenchmarkError: there is one device, or nodes have different numbers of them.
    """
    devices = jax.devices()
    on_gpu = machine.is_gpu(devices[0].platform)
    nodes = nodes_of(devices)
    paths = paths_of(nodes)
    mesh = Mesh(np.asarray(devices), (AXIS,))
    sizes = SIZES if on_gpu else CPU_SIZES
    found: list[LinkTime] = []
    for path in paths:
        say(path.name)
        timers = [timer_of(path, size, mesh, on_gpu) for size in sizes]
        samples = in_turns(timers, SAMPLES)
        found.append(link_time(path, sizes, [float(np.median(each)) for each in samples]))
    return Links(
        schema=SCHEMA,
        machine=machine.describe(),
        measurement_of_speed=on_gpu,
        nodes=len(nodes),
        devices_per_node=len(nodes[0]),
        links=found,
    )


def timer_of(path: Path, size: int, mesh: Mesh, on_gpu: bool) -> LoopTimer:
    """Times one transfer of `size` bytes: a call is there and back, or both ways once."""
    calls = rounds_per_run(20 + size / 200e3, 1, on_gpu) if on_gpu else CPU_CALLS
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    shape = (mesh.size, size // 4)
    block = np.zeros((1, size // 4), np.float32)
    values = jax.make_array_from_callback(shape, sharding, lambda _: block)
    program = jax.jit(functools.partial(_run, path=path, calls=calls, mesh=mesh))
    timer = LoopTimer(
        program, values, (), calls=calls * (1 if path.both_ways else 2), queued=on_gpu
    )
    timer.result()  # compiles, and connects the devices
    return timer


def _run(values: jax.Array, path: Path, calls: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    spec = PartitionSpec(AXIS)

    def loop(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def call(_: jax.Array, x: jax.Array) -> jax.Array:
            x = lax.ppermute(x, AXIS, path.there)
            return x if path.both_ways else lax.ppermute(x, AXIS, path.back)

        x = lax.fori_loop(0, calls, call, x)
        return x, jnp.sum(x[:, :1])[None]

    return jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)(
        values
    )


def link_time(path: Path, sizes: Sequence[int], us: Sequence[float]) -> LinkTime:
    """Alpha and beta of a transfer, from its times."""
    latency = us[0]
    taken = max(us[-1] - latency, 1e-3 * us[-1])
    return LinkTime(
        link=path.link,
        path=path.name,
        both_ways=path.both_ways,
        everyone=path.everyone,
        sizes=list(sizes),
        us=list(us),
        latency_us=latency,
        gb_per_s=(sizes[-1] - sizes[0]) / taken / 1e3,
    )
