"""Reads the compiler's output for a kernel: its PTX, and the files beside it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

# What costs speed is only an "info" to the assembler.
_WARNING = re.compile("warning|Potential Performance Loss")
_SERIALISED = re.compile(r"wgmma\S* instructions are serialized")
_PTX_LINE = re.compile(r"\bline (\d+)")
_LIMITS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)
# Instructions that reach global memory but for bulk copies, with their scope and order.
_ACCESS = re.compile(r"(?<![\w.])((?:red|atom|ld|st)\.[\w.:]*global[\w.:]*)")
# What only reads what was written before the launch: pointers, sizes, descriptors, tables.
_READS_PARAMETERS = re.compile(r"ld\.global(\.nc)?(\.v[24])?\.b(32|64)")
_TENSOR_CORES = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}
_BARRIER = re.compile(r"num_barriers=(\d+)[^)]*\): (\d+)")
_BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """The compiler's output for one kernel.

    Attributes:
      name: of the kernel, and a number.
      ptx: its code.
      registers: of a thread.
      stack_bytes: of a thread, in local memory.
      spill_bytes: stores and loads of registers that did not fit.
      warnings: the assembler's own.
      shared_bytes: of a block: buffers, and barriers; None where unknown.
    """

    name: str
    ptx: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]
    shared_bytes: int | None = None

    @property
    def tensor_cores(self) -> str:
        """The instructions that use them: "wgmma", "tcgen05", "mma", or "" if none does."""
        found = (name for text, name in _TENSOR_CORES.items() if text in self.ptx)
        return next(found, "")

    @property
    def is_serialised(self) -> bool:
        """Whether the tensor cores wait for each product before they begin the next."""
        return any(_SERIALISED.search(warning) for warning in self.warnings)

    @functools.cached_property
    def accesses(self) -> tuple[str, ...]:
        """Instructions that reach global memory, but for bulk copies and reads of parameters."""
        found = _ACCESS.findall(self.ptx)
        return tuple(access for access in found if not _READS_PARAMETERS.fullmatch(access))

    @property
    def scopes(self) -> dict[str, int]:
        """How many of the `accesses` have the scope "sys", "gpu", or none ("plain")."""
        return dict(collections.Counter(map(scope_of, self.accesses)))

    def source_of(self, warning: str) -> str:
        """The "file:line" of a warning of the assembler; "" if it has none."""
        number = _PTX_LINE.search(warning)
        return source_line(self.ptx, int(number[1])) if number else ""


def scope_of(access: str) -> str:
    """The scope of an access to global memory: "sys", "gpu", or "plain"."""
    parts = access.split(".")
    return next((scope for scope in ("sys", "gpu") if scope in parts), "plain")


def source_line(ptx: str, number: int) -> str:
    """The source, as "file:line", of line `number` of `ptx`, counted from 1; "" if unknown."""
    places = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", "\n".join(ptx.splitlines()[:number]), re.M)
    if not places:
        return ""
    file, line = places[-1]
    path = re.search(rf'^\s*\.file\s+{file} "([^"]*)"', ptx, re.M)
    return f"{path[1]}:{line}" if path else ""


def read_kernels(folder: pathlib.Path) -> Iterator[CompiledKernel]:
    """The kernels that Mosaic GPU has dumped to `folder`."""
    for file in sorted(folder.glob("*.ptx")):
        report = file.with_suffix(".ptxas").read_text()
        stack, stores, loads, registers = map(int, _LIMITS.findall(report)[0])
        yield CompiledKernel(
            name=file.stem,
            ptx=file.read_text(),
            registers=registers,
            stack_bytes=stack,
            spill_bytes=stores + loads,
            warnings=tuple(line for line in report.splitlines() if _WARNING.search(line)),
            shared_bytes=_shared_bytes(file.with_suffix(".resources.txt")),
        )


def _shared_bytes(resources: pathlib.Path) -> int | None:
    text = resources.read_text() if resources.exists() else ""
    buffers = re.search(r"smem_scratch_bytes=(\d+)", text)
    if buffers is None:
        return None
    barriers = sum(int(count) * int(times) for count, times in _BARRIER.findall(text))
    return int(buffers[1]) + _BARRIER_BYTES * barriers
