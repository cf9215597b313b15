"""Cases for tests/aot, each compiled in a process of its own, and what is asked of kernels."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from compile_cases import COMPILED_BY
from folders import PYTHONPATH

from stretto.distributed.tools.ptx import CompiledKernel, scope_of

REGISTERS = 65536
# An operand or a result that XLA copies; semaphores are 32 bit integers, and small.
COPIED = re.compile(r"= \(?(?!s32)\w+\[[\d,]+\][^=]*? copy(?:-start)?\(")


# A process of its own for each case, with all that it imports: that alone takes two seconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["compile_cases", "lower_cases"])


def compile_case(
    case: str, folder: Path, timeout_s: float = 280, module: str = "compile_cases"
) -> list[dict]:
    """Compiles a case; each entry is a program with its `label`, `hlo` and `kernels`."""
    file, log = folder / "compiled.json", folder / "log.txt"
    # Python 3.12.1's server of processes has its own path, not the tests' (gh-117378).
    with mock.patch.dict(os.environ, PYTHONPATH):
        forkserver.ensure_running()
    process = _processes.Process(target=_run, args=(module, case, str(file), str(log)))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
    said = log.read_text() if log.exists() else ""
    assert process.exitcode == 0, f"{case}: exit code {process.exitcode}\n{said[-4000:]}"
    compiled = json.loads(file.read_text())
    assert compiled and all("mosaic_gpu_v2" in program["hlo"] for program in compiled)
    served = {name for program in compiled for name in program.get("operations", ())}
    assert served >= {name for name, by in COMPILED_BY.items() if by == case}
    return compiled


def _run(module: str, case: str, file: str, log: str) -> None:
    """Runs a case in this process, which writes to `log` what it has to say."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    importlib.import_module(module).main(case, file)


def flaws(
    kernel: dict,
    *,
    warpgroups: int,
    local: bool,
    target: str = "sm_90a",
    most_spilled: int = 0,
    plain_stores: bool = False,
) -> Iterator[str]:
    """What is wrong with a kernel.

    `local` says whether it has semaphores within a device, `most_spilled` how many bytes of
    registers may be stored to memory, and loaded, `plain_stores` whether threads may store results,
    which nobody reads before the kernel has ended.
    """
    if f".target {target}" not in kernel["ptx"]:
        yield f"it is not compiled for {target}"
    if kernel["spill_bytes"] > most_spilled or (kernel["stack_bytes"] and not most_spilled):
        yield f"{kernel['spill_bytes']} bytes spilled, {kernel['stack_bytes']} of stack"
    warnings = [x for x in kernel["warnings"] if not (most_spilled and "are spilled" in x)]
    if warnings:
        yield f"the assembler warns: {warnings}"
    if kernel["registers"] * 128 * warpgroups > REGISTERS:
        yield f"{kernel['registers']} registers do not fit {warpgroups} warpgroups"
    scoped = CompiledKernel(**kernel).accesses
    if plain_stores:
        scoped = [a for a in scoped if not re.fullmatch(r"st\.global(\.v\d)?\.b32", a)]
    within = [a for a in scoped if scope_of(a) == "gpu"]
    for access in scoped:
        if scope_of(access) != "sys" and not (local and access in within):
            yield f"{access} may cross devices and has not the scope of the system"
        if not re.search(r"\.(acquire|release|relaxed)\.", access):
            yield f"{access} has no order"
    kinds = {access.split(".global")[0] for access in scoped if access not in within}
    if not {"red.release.sys", "ld.acquire.sys"} <= kinds:
        yield f"signals and waits across devices are missing: {sorted(kinds)}"
    if local != bool(within):
        yield f"signals within a device: {within}"
    if kernel["ptx"].count("trap;") < 1:
        yield "no wait has a limit"


def check(compiled: list[dict], **expected) -> None:
    found = [
        f"{program['label']}: {kernel['name']}: {flaw}"
        for program in compiled
        for kernel in program["kernels"]
        for flaw in flaws(kernel, **expected)
    ]
    assert not found, "\n".join(found)
