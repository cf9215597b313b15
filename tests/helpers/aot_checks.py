"""Cases for tests/aot, each compiled in a process of its own, and what is asked of kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from compile_cases import COMPILED_BY
from folders import HELPERS

from stretto.distributed.tools.ptx import CompiledKernel, scope_of

SCRIPT = HELPERS / "compile_cases.py"
REGISTERS = 65536
# An operand or a result that XLA copies; semaphores are 32 bit integers, and small.
COPIED = re.compile(r"= \(?(?!s32)\w+\[[\d,]+\][^=]*? copy(?:-start)?\(")


def compile_case(
    case: str, folder: Path, timeout_s: float = 280, script: Path = SCRIPT
) -> list[dict]:
    """Compiles a case; each entry is a program with its `label`, `hlo` and `kernels`."""
    file = folder / "compiled.json"
    done = subprocess.run(
        [sys.executable, str(script), case, str(file)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(file.read_text())
    assert compiled and all("mosaic_gpu_v2" in program["hlo"] for program in compiled)
    served = {name for program in compiled for name in program.get("operations", ())}
    assert served >= {name for name, by in COMPILED_BY.items() if by == case}
    return compiled


def flaws(kernel: dict, *, warpgroups: int, local: bool, target: str = "sm_90a") -> Iterator[str]:
    """What is wrong with a kernel; `local` says whether it has semaphores within a device."""
    if f".target {target}" not in kernel["ptx"]:
        yield f"it is not compiled for {target}"
    if kernel["spill_bytes"] or kernel["stack_bytes"]:
        yield f"{kernel['spill_bytes']} bytes spilled, {kernel['stack_bytes']} of stack"
    if kernel["warnings"]:
        yield f"the assembler warns: {kernel['warnings']}"
    if kernel["registers"] * 128 * warpgroups > REGISTERS:
        yield f"{kernel['registers']} registers do not fit {warpgroups} warpgroups"
    scoped = CompiledKernel(**kernel).accesses
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
