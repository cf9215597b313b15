"""Time a model's steps with fused projections beside XLA's, in one run on random bytes.

    python examples/transformer/benchmark.py RESULTS
    python examples/transformer/benchmark.py RESULTS --cases 7b-layer:8192 --parts gradients step

The first times a few layers of two models at two lengths, split over all GPUs; RESULTS is a folder,
where each result is written as soon as it is there. A case is a configuration and the length of its
sequence. Parts of a step: "forward" is the loss alone, "gradients" the loss and its gradients with
weights in 16 bits, "remat" the same with whole layers computed again in the backward pass, "step"
all of training with weights in float32.

Backends take turns in random order within each round, so that clocks and temperature weigh on all
alike. The backend "silent" sends nothing for the projections: it computes on as much data of its
own. What the others take longer is communication that they have not hidden. It sends what goes to
experts and back (`--experts`), by XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import config
import jax
import msgspec
import parallel
from breakdown import profile
from jax.sharding import Mesh
from programs import BACKENDS, PARTS, Program, Weights, lower, random_rows
from rates import HEADER, describe_times, show
from timing import measure

import stretto as st
from stretto.benchmarks.measurements.machine import describe
from stretto.benchmarks.timing.compiling import Compiler


class Case(NamedTuple):
    """A configuration, and the bytes in its sequences."""

    name: str
    sequence: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """`name:sequence`; the configuration's own length where none is given."""
        name, _, sequence = text.partition(":")
        if name not in config.SIZES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(config.SIZES)}")
        return cls(name, int(sequence or config.SIZES[name].sequence))

    def sizes(self, args: argparse.Namespace) -> config.Sizes:
        """Of the model."""
        return config.replaced(
            config.SIZES[self.name],
            sequence=self.sequence,
            layers=args.layers,
            feed_forward=args.feed_forward,
            experts=args.experts,
            top_k=args.top_k,
        )


CASES = [Case(name, sequence) for name in ("7b-layer", "70b-layer") for sequence in (4096, 8192)]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `argv` is `sys.argv[1:]` where it is None."""
    parser = argparse.ArgumentParser(description="Time a model's steps, fused and not.")
    parser.add_argument("results", type=Path, help="a folder, made if it is not there")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=CASES, metavar="NAME:BYTES")
    parser.add_argument("--dp", type=int, default=1, help="groups of devices")
    parser.add_argument("--tp", type=int, help="devices of a group; by default, all are used")
    parser.add_argument("--batch", type=int, default=1, help="sequences, over all devices")
    parser.add_argument("--layers", type=int, help="in place of the configuration's")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; over all devices")
    parser.add_argument("--top-k", type=int, default=0, help="experts that a byte goes to")
    parser.add_argument("--feed-forward", type=int, help="width in place of the configuration's")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2])
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["xla", "auto", "silent"]
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--attention", choices=("cudnn", "xla"), help="default: cudnn on GPUs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=3, help="runs of a program in a round")
    parser.add_argument(
        "--profile", nargs="*", choices=PARTS, default=["gradients"], help="parts to break down"
    )
    return parser.parse_args(argv)


class Measurement:
    """What is found out about one case, and the file that holds it."""

    def __init__(self, case: Case, mesh: Mesh, args: argparse.Namespace, weights: Weights):
        self.case, self.mesh, self.args, self.weights = case, mesh, args, weights
        self.sizes = case.sizes(args)
        self.sizes.check_fits(mesh.shape["dp"], mesh.shape["tp"], args.batch)
        self.how = execution(mesh, args)
        self.compiling: dict[tuple[str, str], Future] = {}
        self.programs: dict[tuple[str, str], Program] = {}
        self.found: dict = {
            "case": case._asdict(),
            "sizes": dataclasses.asdict(self.sizes),
            "how": dataclasses.asdict(self.how),
            "batch": args.batch,
            "mesh": dict(mesh.shape),
            "records": [],
        }

    def compile(self, compiler: Compiler) -> None:
        """Begins to compile each program."""
        training = config.replaced(config.TRAININGS[self.case.name], batch=self.args.batch)
        for key in itertools.product(self.args.parts, self.args.backends):
            with self._failures_of("-".join(key)):
                lowered, choices = lower(self.mesh, self.sizes, training, self.how, *key)
                self.found.setdefault("choices", {})["-".join(key)] = choices
                self.compiling[key] = compiler.submit(lowered, by_xla=True)

    def run(self) -> None:
        """Runs each program once, which loads its kernels."""
        rows = random_rows(self.mesh, self.args.batch, self.sizes.sequence)
        for key, compiled in self.compiling.items():
            name = "-".join(key)
            with self._failures_of(name):
                program = Program(key[0], compiled.result(), self.weights, rows)
                loss = self.found.setdefault("first_losses", {})[name] = float(program.run())
                self.programs[key] = program
                print(f"{name}: loss {loss:.4f}", flush=True)
        self.write()

    def time(self) -> list[dict]:
        """Times what was compiled; returns the records that are also printed and written."""
        times = measure(self.programs, self.args.rounds, self.args.runs)
        print(HEADER)
        for part in self.args.parts:
            own = {backend: times[p, backend] for p, backend in times if p == part}
            records = describe_times(self.sizes, self.args.batch, self.mesh.size, part, own)
            for record in records:
                program = self.programs[part, record["backend"]]
                record["needed_gb"] = program.needed_bytes() / 1e9
                self.found["records"].append(record)
                print(show(record), flush=True)
        self.write()
        return self.found["records"]

    def profile(self) -> None:
        """Adds where the time of each program goes, by a profile of two of its runs."""
        for (part, backend), program in self.programs.items():
            if part not in self.args.profile:
                continue
            name = f"{self.case.name}-{self.case.sequence}-{part}-{backend}"
            folder = self.args.results / "profiles" / name
            with self._failures_of(f"profile-{part}-{backend}"):  # a machine may forbid it
                found = profile(lambda p=program: p.run().block_until_ready(), 2, folder)
                self.found.setdefault("breakdown", {})[f"{part}-{backend}"] = dataclasses.asdict(
                    found
                )
                kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found.kinds.items())
                print(f"{name}: {kinds}, idle {found.idle:.2f} ms", flush=True)
        self.write()

    @contextlib.contextmanager
    def _failures_of(self, name: str) -> Iterator[None]:
        """What fails is told, and left out."""
        try:
            yield
        except Exception as error:
            self.found.setdefault("failed", {})[name] = str(error)
            traceback.print_exc()

    def write(self) -> None:
        """Writes all that is known so far."""
        if jax.process_index() == 0:
            file = self.args.results / f"{self.case.name}-{self.case.sequence}.json"
            file.write_text(json.dumps(self.found, indent=1))


def execution(mesh: Mesh, args: argparse.Namespace) -> config.Execution:
    """How the model is computed on these devices, but for the backend."""
    how = config.Execution.suited_to(mesh.devices.flat[0].platform, "xla", args.dtype)
    return config.replaced(how, attention=args.attention)


def begin(mesh: Mesh, args: argparse.Namespace) -> list[Measurement]:
    """The measurements of all cases, with all programs compiled, side by side."""
    weights: dict[str, Weights] = {}  # by configuration: its cases share them
    measurements = []
    with Compiler() as compiler:
        for case in args.cases:
            training = config.TRAININGS[case.name]
            own = Weights(mesh, case.sizes(args), training, args.dtype)
            weights.setdefault(case.name, own)
            measurements.append(Measurement(case, mesh, args, weights[case.name]))
            measurements[-1].compile(compiler)
        compiler.wait()
    return measurements


def main(argv: Sequence[str] | None = None) -> list[dict]:
    """Measures and prints; returns the records of all cases."""
    st.initialize()
    args = parse_arguments(argv)
    mesh = parallel.make_mesh(args.dp, args.tp or len(jax.devices()) // args.dp)
    args.results.mkdir(parents=True, exist_ok=True)
    machine = msgspec.to_builtins(describe())
    (args.results / "machine.json").write_text(json.dumps(machine, indent=1))
    print(f"{machine['num_devices']} x {machine['card']}, JAX {jax.__version__}", flush=True)
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - started:4.0f} s: {what}", flush=True)

    measurements = begin(mesh, args)
    say("compiled")
    records = []
    for measurement in measurements:
        say(f"{measurement.case}, {measurement.sizes}, {measurement.how}")
        measurement.run()
        records += measurement.time()
    for measurement in measurements:  # after all times: the profiler may slow what comes after it
        measurement.profile()
    say("done")
    return records


if __name__ == "__main__":
    main()
