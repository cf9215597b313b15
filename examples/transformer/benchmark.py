"""Time a model's steps with fused projections beside XLA's, in one run on random bytes.

    python examples/transformer/benchmark.py --config 7b-layer --tp 4 --sequence 4096

Parts of a step: "forward" is the loss alone, "gradients" the loss and its gradients with weights in
16 bits, "step" all of training with weights in float32. Backends take turns in random order within
each round, so that clocks and temperature weigh on all alike. The backend "silent" sends nothing:
it computes on as much data of its own, and what the others take longer is communication that they
have not hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import config
import jax
import jax.numpy as jnp
import model
import msgspec
import numpy as np
import parallel
from jax.sharding import Mesh
from step import initial_state, make_train_step
from timing import Program, visit

import stretto as st
from stretto.benchmarks.machine import describe
from stretto.benchmarks.spread import median_ratio, spread

PEAK_TFLOPS = 989.0  # of an H100, 16 bit, without sparsity
PARTS = ("forward", "gradients", "step")
BACKENDS = ("xla", "auto", "pallas", "silent")


class Silent:
    """Stands in for `stretto`: the same arithmetic on the same amount of data, nothing sent."""

    @staticmethod
    def all_gather_matmul(x, weights, axis_name, *, backend):
        """A matmul on this device's rows, repeated as often as there are devices."""
        rows = jnp.tile(x, (jax.lax.axis_size(axis_name), 1))
        return jax.lax.optimization_barrier(rows) @ weights

    @staticmethod
    def matmul_reduce_scatter(x, weights, axis_name, *, backend):
        """A matmul, and the sum over as many parts of it as there are devices."""
        product = jax.lax.optimization_barrier(x @ weights)
        return product.reshape(jax.lax.axis_size(axis_name), -1, product.shape[1]).sum(0)


def flops_per_device(sizes: config.Sizes, part: str, batch: int, devices: int) -> float:
    """Floating-point operations that the model asks for; what remat computes again is not counted.

    Two for every weight of a matrix and byte, and four for every pair of bytes that attention
    compares, half of which are masked; a backward pass is twice a forward pass.
    """
    hidden, head_dim = sizes.hidden, sizes.head_dim
    columns = (sizes.heads + 2 * sizes.kv_heads) * head_dim + hidden + 3 * sizes.feed_forward
    layers = sizes.layers * (2 * hidden * columns + 2 * sizes.sequence * hidden)
    ends = 4 * config.VOCABULARY * hidden
    forward = batch * sizes.sequence * (layers + ends)
    return forward * (1 if part == "forward" else 3) / devices


def make_program(
    mesh: Mesh,
    sizes: config.Sizes,
    training: config.Training,
    how: config.Execution,
    part: str,
    weights: parallel.Tree,
    rows: jax.Array,
) -> Program:
    """Compiles one part of the step with one backend."""
    stand_in = Silent if how.backend == "silent" else st
    with mock.patch.object(model, "st", stand_in):  # while it is traced
        if part == "step":
            state = initial_state(mesh, sizes, training)
            function = make_train_step(mesh, sizes, training, how)
            return Program(function.lower(state, rows, rows).compile(), state, rows, True)
        make = parallel.loss if part == "forward" else parallel.loss_and_gradients
        function = jax.jit(make(mesh, sizes, how))
        return Program(function.lower(weights, rows, rows).compile(), weights, rows, False)


def measure(programs: dict[Any, Program], rounds: int, runs: int) -> dict[Any, list[float]]:
    """Milliseconds of each program: medians of `runs` queued runs, one for each round."""
    queued = jax.devices()[0].platform != "cpu"
    order = random.Random(0)
    times: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key in order.sample(list(programs), len(programs)):
            times[key].append(float(np.median(visit(programs[key], runs, queued))))
    return times


def describe_times(
    sizes: config.Sizes, batch: int, devices: int, part: str, times: dict[str, list[float]]
) -> list[dict]:
    """One record for each backend of a part; ratios are of times of the same round."""
    flops = flops_per_device(sizes, part, batch, devices)
    records = []
    for backend, samples in times.items():
        ms = spread(samples)
        record = {
            "part": part,
            "backend": backend,
            "ms": dataclasses.asdict(ms),
            "rounds": samples,
            "tflops_per_device": flops / ms.median / 1e9,
            "share_of_peak": flops / ms.median / 1e9 / PEAK_TFLOPS,
            "tokens_per_s": batch * sizes.sequence / ms.median * 1e3,
        }
        if "xla" in times:
            record["speedup_over_xla"] = median_ratio(times["xla"], samples)
        if "silent" in times:
            record["exposed_ms"] = ms.median - spread(times["silent"]).median
        records.append(record)
    return records


def show(record: dict) -> str:
    """A record as a line of the table."""
    ms = record["ms"]
    line = f"{record['part']:9}  {record['backend']:7}  {ms['median']:9.2f}"
    line += f"  {ms['p10']:9.2f} to {ms['p90']:9.2f}  {record['tflops_per_device']:7.1f}"
    line += f"  {record['share_of_peak']:6.1%}  {record.get('speedup_over_xla', 1.0):6.3f}"
    return line + f"  {record.get('exposed_ms', np.nan):8.2f}  {record['needed_gb']:7.2f}"


HEADER = (
    "part       backend   ms median        10% to       90%   TFLOP/s    peak  x XLA's"
    "  exposed   GB"
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `argv` is `sys.argv[1:]` where it is None."""
    parser = argparse.ArgumentParser(description="Time a model's steps, fused and not.")
    parser.add_argument("--config", choices=config.SIZES, default="7b-layer")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=len(jax.devices()))
    parser.add_argument("--sequence", type=int, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences, over all devices")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2])
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["xla", "auto", "silent"]
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--attention", choices=("cudnn", "xla"), help="default: cudnn on GPUs")
    parser.add_argument("--no-remat", action="store_true", help="keep what the layers make")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--runs", type=int, default=5, help="runs of a program in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="profile a run of each program"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict]:
    """Measures and prints; returns the records that it also writes as JSON."""
    st.initialize()
    args = parse_arguments(argv)
    sizes = config.replaced(config.SIZES[args.config], sequence=args.sequence, layers=args.layers)
    training = config.replaced(config.TRAININGS[args.config], batch=args.batch)
    sizes.check_fits(args.dp, args.tp, args.batch)
    mesh = parallel.make_mesh(args.dp, args.tp)
    how = config.Execution.suited_to(mesh.devices.flat[0].platform, "xla", args.dtype)
    how = config.replaced(how, attention=args.attention, remat=not args.no_remat)
    machine = msgspec.to_builtins(describe())
    print(f"{args.config}: {sizes}, batch {args.batch}, dp {args.dp} x tp {args.tp}, {how.dtype}")
    print(f"{machine['num_devices']} x {machine['card']}, JAX {jax.__version__},", how, flush=True)

    random_bytes = np.random.default_rng(0).integers(256, size=(args.batch, sizes.sequence))
    rows = parallel.put_rows(mesh, random_bytes.astype(np.int32))
    weights = parallel.initial_weights(mesh, sizes, 0)
    weights = jax.jit(lambda tree: jax.tree.map(lambda w: w.astype(how.dtype), tree))(weights)
    programs, first_losses = {}, {}
    for part in args.parts:
        for backend in args.backends:
            key = part, backend
            backed = dataclasses.replace(how, backend=backend)
            programs[key] = make_program(mesh, sizes, training, backed, part, weights, rows)
            first_losses[key] = float(programs[key].run())  # the first run loads kernels
            print(f"compiled {part} {backend}: loss {first_losses[key]:.4f}", flush=True)

    times = measure(programs, args.rounds, args.runs)
    records = []
    print(HEADER)
    for part in args.parts:
        own = {backend: times[part, backend] for backend in args.backends}
        for record in describe_times(sizes, args.batch, mesh.size, part, own):
            key = part, record["backend"]
            record["needed_gb"] = programs[key].needed_bytes() / 1e9
            record["first_loss"] = first_losses[key]
            records.append(record)
            print(show(record), flush=True)
    about = {"machine": machine, "sizes": dataclasses.asdict(sizes), "how": dataclasses.asdict(how)}
    about |= {"config": args.config, "batch": args.batch, "dp": args.dp, "tp": args.tp}
    if args.json and jax.process_index() == 0:
        args.json.write_text(json.dumps({**about, "records": records}, indent=1))
    if args.trace:
        trace(programs, args.trace)
    return records


def trace(programs: dict[tuple[str, str], Program], folder: Path) -> None:
    """Writes a profile of two runs of each program into a folder of its own below `folder`."""
    for (part, backend), program in programs.items():
        with jax.profiler.trace(str(folder / f"{part}-{backend}")):
            visit(program, 1, queued=False)


if __name__ == "__main__":
    main()
