"""``stretto simulate``: runs a script with its kernels in the simulator, and prints the report."""

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.launch.errors import LaunchError


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status: 1 if a kernel did something wrong."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    return simulate(
        options.script,
        options.args,
        devices=options.devices,
        seeds=range(options.seed, options.seed + options.seeds),
        schedule=options.schedule,
        core_count=options.blocks,
        detect_races=not options.no_races,
        trace=options.trace,
    )


def simulate(
    script: str,
    args: Sequence[str] = (),
    *,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    devices: int = 4,
    schedule: str = "random",
    core_count: int = 4,
    detect_races: bool = True,
    trace: Path | None = None,
) -> int:
    """Runs `script` on CPU devices with the simulator on.

    Args:
      script: path of a Python script.
      args: its arguments.
      seed: of the order of steps.
      seeds: run once with each of these instead, and stop at the first that fails.
      devices: CPU devices that the script sees.
      schedule: "random", "round_robin" or "pct".
      core_count: blocks that kernels launch where they ask for the number of multiprocessors.
      detect_races: look for data races.
      trace: write what every task did to this file, for Perfetto (of the last seed).

    Returns:
      0 if nothing was wrong, 1 if a kernel was, else the status that the script exited with.

    Raises:
      LaunchError: there is no such script, or JAX runs already on other devices.
    """
    if not Path(script).is_file():
        raise LaunchError(f"script {script} does not exist; give the path of a Python file")
    _use_cpu_devices(devices)
    from stretto.distributed import simulator

    for one in seeds if seeds is not None else [seed]:
        report, status = None, 0
        try:
            with simulator.simulate(
                seed=one,
                schedule=schedule,  # pyright: ignore[reportArgumentType]  (argparse has checked)
                core_count=core_count,
                detect_races=detect_races,
                trace=trace is not None,
            ) as report:
                status = _run(script, args)
        except simulator.SimulationError as error:
            # The report tells what is wrong, unless the run ended before it had anything to tell.
            what = "failed" if report is not None and not report.ok else str(error)
            print(f"stretto simulate: seed {one}: {what}", file=sys.stderr)
            status = 1
        if report is not None:
            print(report, file=sys.stderr)
            if trace is not None and report.trace is not None:
                report.trace.save(trace)
        if status:
            return status
    return 0


def _use_cpu_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices and nothing else."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise LaunchError(
                f"JAX already runs on {jax.device_count()} devices, not {count}; start the command"
                " in a process of its own"
            ) from None


def _run(script: str, args: Sequence[str]) -> int:
    """Runs the script as `python script args` would; returns the status that it exits with."""
    with _arguments([script, *args]):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
    return 0


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Sets `sys.argv`, and puts the script's folder where it finds its neighbours."""
    before = sys.argv, sys.path[:]
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto simulate",
        description="Run SCRIPT with its Mosaic GPU kernels in the simulator, on CPU devices, and"
        " print what it found. Options go before SCRIPT; what follows it is the script's.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python script")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("-n", "--devices", type=int, default=4, help="CPU devices (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (%(default)s)")
    parser.add_argument(
        "--schedule",
        choices=("random", "round_robin", "pct"),
        default="random",
        help="order of steps; pct favours rare ones (%(default)s)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=4,
        help="what kernels find as the number of multiprocessors (%(default)s)",
    )
    parser.add_argument("--no-races", action="store_true", help="do not look for data races")
    parser.add_argument("--trace", type=Path, help="write a trace for Perfetto to this file")
    return parser
