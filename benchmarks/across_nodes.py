"""Times of the operations over several nodes, beside XLA's flat and hierarchical versions.

    stretto run -n 4 --processes-per 2 benchmarks/across_nodes.py --json across.json

takes the halves of one host for two nodes; on real nodes leave `--processes-per` out. Every version
is called many times inside one `jit`, each call waiting for the one before, and its time is that of
the slowest process. On CPUs it is a rehearsal, small and by XLA alone: its times say nothing.
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
from stretto.benchmarks.shapes import MATMULS, SETS, Shape, parse_shape, shapes_of
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


SMALL_SHAPES = {op: ("256x128x128" if op in MATMULS else "256x128",) for op in DEFAULT_SHAPES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Time the operations over several nodes, inside one program."""

    operations: str = ",".join(DEFAULT_SHAPES)
    """Which, comma separated."""
    shapes: str = ""
    """Sizes such as 8192x8192x8192 (for matmuls) and 8192x8192 (for the others), and sets of
    `stretto bench`, comma separated; default: some, small ones on CPUs."""
    nodes: int = 2
    """Equal parts of the job's devices that count as nodes."""
    rounds: int | None = None
    """How often each version is timed, in turns; each time four samples. Default: 8, 1 on CPUs."""
    pieces: str = "1,2,4"
    """In how many pieces ours moves between nodes, comma separated."""
    backend: str = ""
    """Of ours: "pallas", "xla" or "simulator"; default: pallas, xla on CPUs."""
    json: pathlib.Path | None = None
    """Where to write the results."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One version of an operation, compiled: its timer and the samples so far, microseconds."""

    name: str
    timer: LoopTimer
    samples: list[float]


def problems(options: Options, devices: int, on_gpu: bool) -> list[tuple[str, Shape]]:
    """(operation, shape) of all that is timed, in order.

    Raises:
      ValueError: an unknown operation, a text that is no shape, a shape that no operation takes, or
        one that does not divide among the devices.
    """
    operations = options.operations.split(",")
    if unknown := set(operations) - set(DEFAULT_SHAPES):
        raise ValueError(
            f"operations={','.join(sorted(unknown))} must be among {','.join(DEFAULT_SHAPES)}."
        )
    asked = tuple(options.shapes.split(",")) if options.shapes else ()
    if unused := [text for text in asked if not any(_fits(text, op) for op in operations)]:
        parse_shape(unused[0], operations[0])  # says what is wrong with it
    found = [
        (op, shape)
        for op in operations
        for text in asked or (DEFAULT_SHAPES[op] if on_gpu else SMALL_SHAPES[op])
        if _fits(text, op)
        for shape in shapes_of(text, op, devices)
    ]
    for op, shape in found:
        peers.check_divides(op, shape, devices)
    return found


def _fits(text: str, op: str) -> bool:
    """Whether it is a set, or has the form of the operation's shapes."""
    return text in SETS or (text.count("x") == 2) == (op in MATMULS)


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
    backend = options.backend or ("pallas" if on_gpu else "xla")
    for name, body, blocks in peers.versions(op, shape, mesh.size, backend, pieces):
        if blocks not in made:
            made[blocks] = operands_of(blocks, mesh)
        operands = made[blocks]
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
    rounds = options.rounds or (8 if machine.is_gpu(jax.default_backend()) else 1)
    for _ in range(rounds):
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
    work = problems(options, mesh.size, machine.is_gpu(jax.default_backend()))
    about = msgspec.to_builtins(machine.describe())
    results = []
    with settings.nodes_of(mesh.shape[GPU]):
        for op, shape in work:
            results.append(measure(op, shape, mesh, options))
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
