"""Times of the operations over several nodes, beside XLA's flat and hierarchical versions.

    stretto run -n 4 --processes-per 2 benchmarks/across_nodes.py --json across.json

takes the halves of one host for two nodes; on real nodes leave `--processes-per` out. Every version
is called many times inside one `jit`, each call waiting for the one before, and its time is that of
the slowest process.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import tyro
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto.launch
from stretto.benchmarks import across_nodes_peers as peers
from stretto.benchmarks import machine
from stretto.benchmarks.shapes import Shape, parse_shape
from stretto.benchmarks.spread import spread
from stretto.benchmarks.timing import SAMPLES_PER_VISIT, LoopTimer, rounds_per_run
from stretto.distributed import settings

NODE, GPU = peers.NODE, peers.GPU
BOTH = (NODE, GPU)
DEFAULT_SHAPES = {
    "all_gather_matmul": ("8192x8192x8192", "8192x8192x28672", "16384x16384x16384"),
    "matmul_reduce_scatter": ("8192x8192x8192", "8192x28672x8192", "16384x16384x16384"),
    "matmul_all_reduce": ("8192x8192x8192", "8192x28672x8192"),
    "all_gather": ("8192x8192", "16384x16384"),
    "reduce_scatter": ("8192x8192", "16384x16384"),
    "all_reduce": ("8192x8192", "16384x16384"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Time the operations over several nodes, inside one program."""

    operations: str = ",".join(DEFAULT_SHAPES)
    """Which, comma separated."""
    shapes: str = ""
    """Sizes such as 8192x8192x8192 (matmuls) or 8192x8192, comma separated; default: some."""
    nodes: int = 2
    """Equal parts of the job's devices that count as nodes."""
    rounds: int = 8
    """How often each version is timed, in turns; each time four samples."""
    pieces: str = "1,2,4"
    """In how many pieces ours moves between nodes, comma separated."""
    backend: str = "pallas"
    """Of ours; "simulator" or "xla" to rehearse without GPUs."""
    json: pathlib.Path | None = None
    """Where to write the results."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One version of an operation, compiled: its timer and the samples so far, microseconds."""

    name: str
    timer: LoopTimer
    samples: list[float]


def mesh_of(nodes: int) -> Mesh:
    """All devices of the job, `nodes` equal parts of them along the first axis."""
    devices = np.array(jax.devices())
    if devices.size % nodes:
        raise ValueError(f"nodes={nodes} must divide the {devices.size} devices of the job.")
    return Mesh(devices.reshape(nodes, -1), BOTH, axis_types=(AxisType.Auto,) * 2)


def looped(body: Callable[..., jax.Array], calls: int) -> Callable[..., tuple]:
    """(token, *operands) -> the next token, the last call's result; `calls` calls in a row.

    Operands and token pass a barrier together, so that XLA neither drops a call nor begins it
    before the one before has ended.
    """

    def call(token, operands):
        operands, token = lax.optimization_barrier((operands, token))
        out = lax.optimization_barrier(body(*operands))
        return token + out[:1, :1].astype(jnp.float32), out

    def loop(token, *operands):
        token = lax.fori_loop(0, calls - 1, lambda _, t: call(t, operands)[0], token)
        return call(token, operands)

    return loop


def operands_of(blocks: Sequence[peers.Block], mesh: Mesh) -> list[jax.Array]:
    """Random operands, in bfloat16; every device's blocks are its own."""

    def fill() -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index(BOTH))
        keys = jax.random.split(key, len(blocks))
        return tuple(
            jax.random.normal(k, block).astype(jnp.bfloat16)
            for k, block in zip(keys, blocks, strict=True)
        )

    program = jax.shard_map(fill, mesh=mesh, in_specs=(), out_specs=P(BOTH), check_vma=False)
    return list(jax.jit(program)())


def compiled(
    op: str, shape: Shape, mesh: Mesh, options: Options
) -> Iterator[tuple[str, Timed | str]]:
    """(name, version) or (name, why there is none)."""
    made: dict[tuple[peers.Block, ...], list[jax.Array]] = {}
    token = jax.device_put(np.zeros((mesh.size, 1), np.float32), NamedSharding(mesh, P(BOTH)))
    on_gpu = machine.is_gpu(jax.default_backend())
    calls = rounds_per_run(peers.expected_us(op, shape, mesh.size), 1, on_gpu) + 1
    pieces = [int(count) for count in options.pieces.split(",")]
    for name, body, blocks in peers.versions(op, shape, mesh.size, options.backend, pieces):
        operands = made.setdefault(blocks, operands_of(blocks, mesh))
        program = jax.shard_map(
            looped(body, calls), mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False
        )
        try:
            executable = jax.jit(program).lower(token, *operands).compile()
            timer = LoopTimer(executable, token, operands, calls, queued=on_gpu)
            timer.visit(1)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        yield name, Timed(name, timer, [])


def measure(op: str, shape: Shape, mesh: Mesh, options: Options) -> dict[str, Any]:
    """Times of all versions of one operation, in turns and random order, as JSON's types."""
    found = dict(compiled(op, shape, mesh, options))
    timed = {name: version for name, version in found.items() if isinstance(version, Timed)}
    order = random.Random(0)  # The same on every process.
    for _ in range(options.rounds):
        for version in order.sample(list(timed.values()), len(timed)):
            version.samples.extend(version.timer.visit(SAMPLES_PER_VISIT))
    exact = timed[peers.FLAT].timer.result()
    entry: dict[str, Any] = {"op": op, "shape": str(shape), "versions": {}}
    for name, version in found.items():
        if isinstance(version, str):
            entry["versions"][name] = {"error": version}
            continue
        times = dataclasses.asdict(spread(version.samples))
        if name != peers.ALONE:
            times["difference"] = difference(version.timer.result(), exact)
        entry["versions"][name] = times
    return entry


def difference(out: jax.Array, exact: jax.Array) -> float:
    """Norm of the difference over the norm, of all elements."""

    @jax.jit
    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return float(relative(out, exact))


def describe(entry: dict[str, Any]) -> str:
    """One line for an operation at one shape."""
    parts = [
        f"{name} {found['median']:.0f}" if "median" in found else f"{name}: {found['error']}"
        for name, found in entry["versions"].items()
    ]
    return f"{entry['op']} {entry['shape']} (us): {', '.join(parts)}"


def main(options: Options) -> None:
    """Times all that `options` say; process 0 prints and writes."""
    process = stretto.launch.initialize()
    mesh = mesh_of(options.nodes)
    about = msgspec.to_builtins(machine.describe())
    results = []
    with settings.nodes_of(mesh.shape[GPU]):
        for op in options.operations.split(","):
            shapes = options.shapes.split(",") if options.shapes else DEFAULT_SHAPES[op]
            for text in shapes:
                results.append(measure(op, parse_shape(text, op), mesh, options))
                if process.process_id == 0:
                    print(describe(results[-1]), flush=True)
    if process.process_id == 0 and options.json is not None:
        document = {
            "machine": about,
            "nodes": options.nodes,
            "devices_per_node": mesh.shape[GPU],
            "unit": "us",
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, args=sys.argv[1:]))
