"""``stretto simulate``: runs a script with its kernels in the simulator, and prints the report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.launch.commands import on_cpus
from stretto.launch.commands.after_script import hint
from stretto.launch.errors import LaunchError

if TYPE_CHECKING:
    from stretto.distributed.simulator import Report

NOTHING_SIMULATED = 3
"""The exit status where the script ran to its end without a kernel in the simulator."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status, as `simulate` does."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    _check(options)
    hint("stretto simulate", argv, options.args, ("-n", "--target"))
    return simulate(
        options.script,
        options.args,
        devices=options.devices,
        seeds=range(options.seed, options.seed + options.seeds),
        schedule=options.schedule,
        from_the_end=True if options.reversed else None,
        core_count=options.blocks,
        detect_races=not options.no_races,
        check_hardware=not options.no_hardware,
        target=options.target,
        trace=options.trace,
    )


def simulate(
    script: str,
    args: Sequence[str] = (),
    *,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    devices: int = 4,
    schedule: str = "rotating",
    from_the_end: bool | None = None,
    core_count: int = 4,
    detect_races: bool = True,
    check_hardware: bool = True,
    target: str = "h100",
    trace: Path | None = None,
) -> int:
    """Runs `script` on CPU devices with the simulator on.

    Args:
      script: path of a Python script.
      args: its arguments.
      seed: of the order of steps.
      seeds: run once with each of these instead, and stop at the first that fails.
      devices: CPU devices that the script sees.
      schedule: "random", "round_robin", "pct", or "rotating": one or the other, by the seed.
      from_the_end: kernels count their devices from the end; None leaves it to the seed.
      core_count: the number of multiprocessors that kernels see.
      detect_races: detect data races.
      check_hardware: report kernels that no such GPU runs. They are the same for every seed, so
        that is done for the first alone.
      target: the GPU that is simulated, "h100" or "b200".
      trace: write what every task did to this file, for Perfetto (of the last seed).

    Returns:
      0 if nothing was wrong; 1 if a kernel was, or if the script raised an exception;
      `NOTHING_SIMULATED` if no kernel ran in the simulator; else the status that the script exited
      with.

    Raises:
      LaunchError: there is no such script, or JAX runs already on other devices.
    """
    on_cpus.check_script(script)
    on_cpus.use_devices(devices)
    from stretto.distributed import simulator

    seeds, launches, failures = [seed] if seeds is None else seeds, 0, 0
    for one in seeds:
        report, status = None, 0
        turned = _counts_from_the_end(one) if from_the_end is None else from_the_end
        try:
            with simulator.simulate(
                seed=one,
                schedule=schedule,  # pyright: ignore[reportArgumentType]  (argparse has checked)
                from_the_end=turned,
                core_count=core_count,
                detect_races=detect_races,
                check_hardware=check_hardware and one == seeds[0],
                target=target,
                trace=trace is not None,
            ) as report:
                status = on_cpus.run(script, args)
                if status:
                    report.fail(f"the script ended with status {status}")
        except simulator.SimulationError:
            if report is None:
                raise
            _say(f"stretto simulate: seed {one} failed; --seed {one} runs it again")
            status = 1
        except Exception as error:
            on_cpus.show(error, script)
            if report is not None and report.launches:
                _say(f"{report.title}: the script ended so; --seed {one} runs it again")
            return 1
        if report is not None:
            _tell(report, among_others=len(seeds) > 1)
            failures += report.nested_failures
            launches += report.launches + report.nested_launches
            if trace is not None and report.trace is not None:
                report.trace.save(trace)
        if status or not launches:
            return status or NOTHING_SIMULATED
    if len(seeds) > 1:
        found = f"{failures} of the script's own simulations found something wrong"
        found = found if failures else "nothing wrong found"
        _say(f"{len(seeds)} seeds, {launches} kernel launches: {found}")
    return 0


def _counts_from_the_end(seed: int) -> bool:
    """Whether kernels count their devices from the end in a run with `seed`: two of four do.

    So each schedule of the rotation, which is the other one for the next seed, has both.
    """
    return seed // 2 % 2 == 1


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is started."""
    counts = ("-n", options.devices), ("--seeds", options.seeds), ("--blocks", options.blocks)
    for name, value in counts:
        if value < 1:
            raise LaunchError(f"{name} {value} must be at least 1")
    trace = options.trace
    if trace is not None and (trace.is_dir() or not os.access(trace.parent, os.W_OK)):
        raise LaunchError(f"--trace {trace} cannot be written; give a file in a folder that can")


def _tell(report: Report, *, among_others: bool) -> None:
    """Prints the report of one seed: one line, if other seeds follow and it has no finding."""
    if report.launches and among_others and report.ok:
        seen = f"; --seed {report.seed} alone shows its warnings" if report.warnings else ""
        _say(f"{report.title}: {report.launches} kernel launches, nothing wrong found{seen}")
    elif report.launches or not report.ok:
        _say(str(report))
    elif report.nested_launches:
        failures = report.nested_failures
        found = f": {failures} of them found something wrong" if failures else ""
        _say(
            f"{report.title}: {report.nested_launches} kernel launches, in the script's own"
            f" simulations{found}"
        )
    else:
        _say(
            f"{report.title}: no kernel was simulated; print(stretto.explain(...)) beside a call"
            " says what serves it, and why"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto simulate",
        description="Run SCRIPT with its Mosaic GPU kernels in the simulator, on CPU devices, and"
        " print what it found. Options go before SCRIPT; what follows it is the script's.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python script")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("-n", "--devices", type=int, default=4, help="CPU devices (%(default)s)")
    parser.add_argument(
        "--target",
        choices=("h100", "b200"),
        default="h100",
        help="the GPU that is simulated (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (%(default)s)")
    parser.add_argument(
        "--schedule",
        choices=("rotating", "random", "round_robin", "pct"),
        default="rotating",
        help="order of steps; pct favours rare ones; rotating is pct for even seeds, random for odd"
        " ones (%(default)s)",
    )
    parser.add_argument(
        "--reversed",
        action="store_true",
        help="count devices from the end for all seeds, as kernels do in jobs of several nodes"
        " (without it: for two of every four seeds, from the third on)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=4,
        help="the number of multiprocessors that kernels see (%(default)s)",
    )
    parser.add_argument("--no-races", action="store_true", help="do not detect data races")
    parser.add_argument(
        "--no-hardware",
        action="store_true",
        help="do not check whether that GPU can run the kernels",
    )
    parser.add_argument("--trace", type=Path, help="write a trace for Perfetto to this file")
    return parser
