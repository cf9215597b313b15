"""Train a language model on the sources of Python's standard library, on all devices.

    stretto run -n 4 examples/transformer/train.py --config tiny

With `--backend` the four projections of a layer are fused kernels, XLA's collectives, or whatever
is faster; nothing else changes. A run writes checkpoints; `--resume`, or `stretto run --restarts`,
goes on from the newest of the newest run, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path

import config
import data
import jax
import parallel
from checkpoint import Checkpoints, run_folder
from jax.sharding import Mesh
from sample import sample
from step import TrainState, initial_state, make_train_step, state_shapes

import stretto as st
from stretto.launch import progress

LOG_EVERY = 20  # steps


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; `argv` is `sys.argv[1:]` where it is None."""
    parser = argparse.ArgumentParser(description="Train a transformer on Python's own sources.")
    parser.add_argument("--config", choices=config.SIZES, default="tiny")
    parser.add_argument(
        "--backend",
        choices=("auto", "pallas", "xla", "simulator"),
        default="auto",
        help="what serves the projections: fused kernels (pallas, on GPUs), XLA's collectives,"
        " the faster of the two (auto), or fused kernels on simulated GPUs",
    )
    parser.add_argument("--tp", type=int, help="devices that share each sequence")
    parser.add_argument("--dp", type=int, help="groups of devices that share each batch")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; over all devices")
    parser.add_argument("--top-k", type=int, default=0, help="experts that a byte goes to")
    parser.add_argument(
        "--cp", type=int, default=1, help="devices that have some bytes each of every sequence"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the matmuls' operands (default: bfloat16, or float32 for XLA on CPUs)",
    )
    parser.add_argument("--steps", type=int, help="steps of the whole run")
    parser.add_argument("--batch", type=int, help="sequences in a step, over all devices")
    parser.add_argument("--sequence", type=int, help="bytes in a sequence")
    parser.add_argument("--evaluate-every", type=int, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), metavar="FOLDER")
    parser.add_argument(
        "--remat",
        choices=("elementwise", "layer"),
        default="elementwise",
        help="what the backward pass computes again: less memory with a whole layer, less time"
        " with what is elementwise",
    )
    parser.add_argument(
        "--fp8",
        choices=("tensor", "row", "block"),
        help="projections and experts in 8 bits, with scales of a tensor, of rows or of blocks;"
        " weights and optimiser stay in float32",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the newest run, if any")
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to write at the end")
    return parser.parse_args(argv)


def choose_mesh(dp: int | None, tp: int | None, kv_heads: int, cp: int = 1) -> Mesh:
    """All devices: as many along "tp" as the heads can be split over, if neither is given."""
    devices = max(1, len(jax.devices()) // cp)
    if tp is None:
        tp = math.gcd(devices, kv_heads) if dp is None else max(1, devices // dp)
    return parallel.make_mesh(dp or max(1, devices // tp), tp, cp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is made of, and where."""

    sizes: config.Sizes
    training: config.Training
    how: config.Execution
    mesh: Mesh
    corpus: data.Corpus
    say: Callable[[str], None]

    def batch(self, step: int) -> list[jax.Array]:
        """Tokens and targets of a step of training, split over the mesh."""
        sizes, training = self.sizes, self.training
        batch = data.training_batch(
            self.corpus, step, training.batch, sizes.sequence, training.seed
        )
        return [parallel.put_rows(self.mesh, rows) for rows in batch]

    def validation_loss(self, loss: Callable, state: TrainState) -> float:
        """Mean loss on the validation text, in nats per byte."""
        count, size = self.training.evaluation_batches, (self.training.batch, self.sizes.sequence)
        batches = (data.validation_batch(self.corpus, i, count, *size) for i in range(count))
        losses = [
            float(loss(state.weights, *(parallel.put_rows(self.mesh, rows) for rows in batch)))
            for batch in batches
        ]
        return sum(losses) / count

    def about(self) -> dict:
        """What must be the same when the run goes on; the number of steps may grow."""
        training = dataclasses.asdict(self.training)
        own = ("batch", "seed", "learning_rate", "warmup", "weight_decay", "clip")
        return {
            **dataclasses.asdict(self.sizes),
            **{name: training[name] for name in own},
            "dtype": self.how.dtype,
            **({"fp8": self.how.fp8} if self.how.fp8 else {}),
            "corpus": self.corpus.digest,
        }


def train(run: Run, state: TrainState, checkpoints: Checkpoints) -> tuple[TrainState, list[float]]:
    """Trains to the end; returns the last state and the loss of every step that was made."""
    train_step = make_train_step(run.mesh, run.sizes, run.training, run.how)
    validation = jax.jit(parallel.loss(run.mesh, run.sizes, run.how))
    on_cpu = run.mesh.devices.flat[0].platform == "cpu"
    losses: list[jax.Array] = []
    since, started = int(state.step), time.perf_counter()
    for step in range(since, run.training.steps):
        progress(step, "train_step")
        state, loss = train_step(state, *run.batch(step))
        losses.append(loss)
        if on_cpu:  # where programs in flight together could wait for each other's threads
            loss.block_until_ready()
        made = step + 1
        is_last = made == run.training.steps
        if len(losses) == 1 or made % LOG_EVERY == 0 or is_last:  # the first is slow: it compiles
            shown = float(loss)  # waits for the device
            rate = (made - since) * run.training.batch * run.sizes.sequence
            rate /= time.perf_counter() - started
            run.say(f"{made:6d}  {shown:8.4f}  {rate:11,.0f}  {peak_memory() / 1e9:9.2f}")
            since, started = made, time.perf_counter()
        if made % run.training.evaluate_every == 0 or is_last:
            progress(step, "validation")
            nats = run.validation_loss(validation, state)
            run.say(f"{made:6d}  validation: {nats:.4f} nats per byte")
            checkpoints.save(made, state)
            since, started = made, time.perf_counter()
    return state, [float(loss) for loss in losses]


def peak_memory() -> int:
    """Bytes: the most that this process's first GPU had in use, or the process on a CPU."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


def make_run(args: argparse.Namespace, process_id: int, num_processes: int) -> Run:
    """The run that the command line asks for.

    Raises:
      ValueError: sizes that the mesh cannot split.
      SystemExit: a simulation over several processes.
    """
    if args.backend == "simulator" and num_processes > 1:
        raise SystemExit("Simulated GPUs share a process: stretto run --processes-per node.")
    sizes = config.replaced(
        config.SIZES[args.config],
        sequence=args.sequence,
        experts=args.experts,
        top_k=args.top_k,
    )
    training = config.replaced(
        config.TRAININGS[args.config],
        steps=args.steps,
        batch=args.batch,
        evaluate_every=args.evaluate_every,
    )
    mesh = choose_mesh(args.dp, args.tp, sizes.kv_heads, args.cp)
    sizes.check_fits(mesh.shape["dp"], mesh.shape["tp"], training.batch, parallel.cp_of(mesh))
    how = config.Execution.suited_to(mesh.devices.flat[0].platform, args.backend, args.dtype)
    how = dataclasses.replace(how, remat=args.remat, fp8=args.fp8)
    if how.dtype == "float32":  # GPUs would round operands to TF32
        jax.config.update("jax_default_matmul_precision", "highest")

    def say(line: str) -> None:
        if process_id == 0:
            print(line, flush=True)

    return Run(
        sizes=sizes, training=training, how=how, mesh=mesh, corpus=data.load_corpus(), say=say
    )


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, prints, writes checkpoints and some text; returns the loss of every step made."""
    args = parse_arguments(argv)
    process = st.initialize()  # joins the other processes, if there are any
    resume = args.resume or process.restart > 0
    folder = run_folder(args.checkpoints, args.config, resume=resume)
    run = make_run(args, process.process_id, process.num_processes)
    mesh, how = run.mesh, run.how
    weights = sum(math.prod(w.shape) for w in jax.tree.leaves(parallel.structure(run.sizes)[1]))
    shape, axes = " x ".join(map(str, mesh.devices.shape)), " x ".join(mesh.axis_names)
    run.say(
        f"mesh: {shape} ({axes}), devices:"
        f" {mesh.devices.flat[0].device_kind}, processes: {process.num_processes},"
        f" type: {how.dtype}{f' (fp8 by {how.fp8})' if how.fp8 else ''}, backend: {how.backend}"
    )
    run.say(f"weights: {weights:,}, text: {len(run.corpus.training):,} bytes")

    with contextlib.closing(Checkpoints(folder, run.about())) as checkpoints:
        if checkpoints.newest() is None:
            state = initial_state(mesh, run.sizes, run.training)
        else:
            state = checkpoints.restore(state_shapes(mesh, run.sizes, run.training))
            run.say(f"going on after step {int(state.step)} of {folder}")
        run.say("  step      loss    tokens/s  memory GB")
        state, losses = train(run, state, checkpoints)
    run.say(f"checkpoints: {folder}")
    if args.sample:
        text = sample(mesh, run.sizes, how, state.weights, count=args.sample)
        run.say(text.decode("utf-8", "replace"))
    return losses


if __name__ == "__main__":
    main()
