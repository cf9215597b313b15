"""``stretto compile``: compiles a script's kernels for GPUs that need not be there."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.launch.commands import on_cpus
from stretto.launch.commands.after_script import hint
from stretto.launch.errors import LaunchError

if TYPE_CHECKING:
    from stretto.distributed.compiling import Target
    from stretto.distributed.tools.ahead import FoundKernel, Outcome

NOTHING_COMPILED = 3
"""The exit status where the script ran to its end without a kernel."""
HEADING = (
    *("kernel", "operands", "registers", "spilled", "tensor cores", "shared", "accesses"),
    "program",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status, as `compile_script` does."""
    options = _parser().parse_args(list(argv))
    if options.devices < 1:
        raise LaunchError(f"-n {options.devices} must be at least 1")
    hint("stretto compile", argv, options.args, ("-n", "--target", "--json"))
    return compile_script(
        options.script,
        options.args,
        devices=options.devices,
        target=options.target,
        as_json=options.json,
    )


def compile_script(
    script: str,
    args: Sequence[str] = (),
    *,
    devices: int = 4,
    target: str = "h100",
    as_json: bool = False,
) -> int:
    """Compiles the kernels of `script` for GPUs, and prints what became of each.

    The script runs on CPU devices, where its kernels compute nothing: their results are zeros. So
    an `AssertionError` of its own, after the first kernel, ends it but is no failure.

    Args:
      script: path of a Python script.
      args: its arguments.
      devices: CPU devices that it sees, and GPUs that are compiled for.
      target: a file of `configs/targets/`, without its ending.
      as_json: print a JSON object in place of the table, and the script's own output on stderr.

    Returns:
      0 if all kernels compile and none spills; 1 if one does not or does, or if the script raised
      an exception; `NOTHING_COMPILED` if there was no kernel; else the status that the script
      exited with.

    Raises:
      LaunchError: there is no such script or target, the compiler is not installed, or JAX runs
        already on other devices.
    """
    on_cpus.check_script(script)
    on_cpus.use_devices(devices)
    from stretto.distributed.tools import ahead

    try:
        gpus = ahead.gpus(target, devices)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(str(error)) from error
    found: dict[Any, FoundKernel] = {}
    stopped, status = "", 0
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            with ahead.finding(gpus) as found:
                status = on_cpus.run(script, args)
        except AssertionError as error:
            stopped, status = f"{on_cpus.place(error, script)}: AssertionError", 0 if found else 1
            if not found:
                on_cpus.show(error, script)
        except Exception as error:
            on_cpus.show(error, script)
            stopped, status = f"{on_cpus.place(error, script)}: {type(error).__name__}", 1
    outcomes = [ahead.compile_kernel(kernel, gpus) for kernel in found.values()]
    print(_json(outcomes, gpus, stopped) if as_json else table(outcomes, gpus))
    if stopped and found:
        _say(
            f"the script stopped at {stopped}. Later kernels were not compiled. Kernels compute"
            " nothing here: their results are zeros"
        )
    if not outcomes:
        if stopped:
            return status
        _say(
            "the script called no kernel; print(stretto.explain(...)) beside a call says what"
            " serves it, and why"
        )
        return status or NOTHING_COMPILED
    return status if all(outcome.is_good for outcome in outcomes) else 1


def table(outcomes: Sequence[Outcome], gpus: Target) -> str:
    """A line for each kernel, and below them what is wrong with which, and where."""
    if not outcomes:
        return f"compiled for {gpus.kind}: nothing"
    rows = [HEADING, *map(_row, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    flaws = [flaw for outcome in outcomes for flaw in _flaws(outcome)]
    return "\n".join([f"compiled for {gpus.kind}:", *lines, *flaws])


def _row(outcome: Outcome) -> tuple[str, ...]:
    compiled, operands = outcome.compiled, " ".join(outcome.operands)
    programs = ", ".join(outcome.programs)
    if compiled is None:
        return outcome.name, operands, "-", "-", "does not compile", "-", "-", programs
    scopes = compiled.scopes
    return (
        outcome.name,
        operands,
        str(compiled.registers),
        f"{compiled.spill_bytes} B",
        "serialised" if compiled.is_serialised else compiled.tensor_cores or "not used",
        _size(compiled.shared_bytes),
        ", ".join(f"{scopes[name]} {name}" for name in ("sys", "gpu", "plain") if name in scopes),
        programs,
    )


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KB"


def _flaws(outcome: Outcome) -> list[str]:
    compiled = outcome.compiled
    if compiled is None:
        return [f"kernel {outcome.name} does not compile: {outcome.error}"]
    found = []
    if compiled.spill_bytes:
        found.append(
            f"kernel {outcome.name} spills: {compiled.spill_bytes} bytes of stores and loads of"
            f" registers that do not fit.\n  Its body is at {outcome.site}"
        )
    for warning in (w for w in compiled.warnings if "spilled" not in w):
        source = compiled.source_of(warning) or f"its body, {outcome.site}"
        found.append(f"kernel {outcome.name}: {warning}\n  at {source}")
    return found


def _json(outcomes: Sequence[Outcome], gpus: Target, stopped: str) -> str:
    kernels = [
        dict(
            name=outcome.name,
            operands=outcome.operands,
            file=outcome.site.file,
            line=outcome.site.line,
            programs=outcome.programs,
            error=outcome.error or None,
        )
        | ({} if outcome.compiled is None else _numbers(outcome.compiled))
        for outcome in outcomes
    ]
    return json.dumps(dict(target=gpus.kind, stopped=stopped or None, kernels=kernels), indent=2)


def _numbers(compiled: Any) -> dict[str, Any]:
    return dict(
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        stack_bytes=compiled.stack_bytes,
        tensor_cores=compiled.tensor_cores or None,
        serialised=compiled.is_serialised,
        shared_bytes=compiled.shared_bytes,
        accesses=compiled.scopes,
        warnings=compiled.warnings,
    )


def _say(text: str) -> None:
    print(f"stretto compile: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto compile",
        description="Run SCRIPT on CPU devices, and compile its Mosaic GPU kernels for GPUs. No GPU"
        " is needed. Prints the results of the compiler. Kernels do not run: their results"
        " are zeros. Options go before SCRIPT; all arguments after it are the script's.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python script")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("-n", "--devices", type=int, default=4, help="GPUs (%(default)s)")
    parser.add_argument(
        "--target", default="h100", help="h100 (which serves for an H200) or b200 (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON on stdout, and nothing else"
    )
    return parser
