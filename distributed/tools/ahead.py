"""Compiling the kernels of programs that run on CPU devices for GPUs that are not there.

Inside `finding` kernels are found as their programs are lowered, and compute nothing: their results
are zeros. Each is then compiled alone, for as many GPUs as it was lowered for. What is traced
inside takes the GPUs' number of multiprocessors, and of Stretto's operations the kernel wherever
one can serve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, cast

from stretto.distributed import compiling, simulating
from stretto.distributed.compiling import Target
from stretto.distributed.primitives import ahead, cpu_kernels
from stretto.distributed.primitives.cpu_kernels import LoweredKernel
from stretto.distributed.private_jax import cores, lowering, tracing
from stretto.distributed.simulator.refusals import lowering as refusals
from stretto.distributed.sites import Site, is_kernel_code, kernel_site
from stretto.distributed.tools import aot
from stretto.distributed.tools.ptx import CompiledKernel


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoundKernel:
    """A kernel of one or more programs.

    Attributes:
      kernel: as it was lowered first.
      programs: the names of those that it is in, in the order in which they were lowered.
    """

    kernel: LoweredKernel
    programs: list[str]

    @property
    def site(self) -> Site:
        """Where its body is defined."""
        return kernel_site(self.kernel.jaxpr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a kernel's compilation.

    Attributes:
      name: of the kernel.
      operands: their types and shapes, of one device.
      site: where its body is defined.
      programs: that it is in.
      compiled: the compiler's output; None without one.
      error: why it does not compile, with its line where that is known; else empty.
    """

    name: str
    operands: tuple[str, ...]
    site: Site
    programs: tuple[str, ...]
    compiled: CompiledKernel | None
    error: str

    @property
    def is_good(self) -> bool:
        """Whether it compiles and nothing spills."""
        return self.compiled is not None and not self.compiled.spill_bytes


_found: list[dict[Any, FoundKernel]] = []


def gpus(name: str, devices: int) -> Target:
    """The target of this name, which `devices` GPUs of one host are compiled for.

    Raises:
      ValueError: an unknown target.
      RuntimeError: the compiler is not installed, or JAX has not loaded it.
    """
    device: Any = aot.mesh_of_gpus((devices,), ("x",), target=name).devices.flat[0]
    return Target(name, device.device_kind, device.core_count)


@contextlib.contextmanager
def finding(gpu: Target) -> Iterator[dict[Any, FoundKernel]]:
    """Finds the kernels of the programs that are lowered inside; yields what grows meanwhile."""
    found: dict[Any, FoundKernel] = {}
    _found.append(found)
    try:
        with compiling.compiling_for(gpu), cores.cpu_core_count(gpu.multiprocessors):
            yield found
    finally:
        _found.remove(found)


def compile_kernel(found: FoundKernel, gpu: Target) -> Outcome:
    """Compiles a kernel alone. Not to be called from two threads at once."""
    kernel, compiled, error = found.kernel, None, ""
    shape, names = kernel.axis_sizes or (1,), kernel.axis_names or ("x",)
    mesh = aot.mesh_of_gpus(shape, cast(Any, names), target=gpu.name)
    try:
        with tracing.whole_tracebacks():
            program, operands = ahead.alone(kernel, mesh)
            (compiled,) = aot.compile_program(program, *operands).kernels
    except Exception as exception:
        error = _explain(exception, kernel, gpu)
    return Outcome(
        name=kernel.name,
        operands=tuple(_short(x) for x in kernel.in_avals),
        site=found.site,
        programs=tuple(found.programs),
        compiled=compiled,
        error=error,
    )


def _text(jaxpr: Any) -> str:
    """A jaxpr in words that are the same for each trace of a kernel: variables' ids are not."""
    seen: dict[str, int] = {}
    return re.sub(
        r"\b(id=\d+|0x[0-9a-f]+)", lambda id_: str(seen.setdefault(id_[0], len(seen))), str(jaxpr)
    )


def _short(aval: Any) -> str:
    """ "bfloat16[8,128]"."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _explain(error: Exception, kernel: LoweredKernel, gpu: Target) -> str:
    """Why a kernel does not compile, and where: by JAX's lowering, or the compiler after it."""
    told = diagnostic("\n".join(getattr(error, "__notes__", ())))
    if told is not None:
        text, site = told
        return f"for an {gpu.kind} the compiler says: {text}" + (f"\n  at {site}" if site else "")
    refusal = lowering.refusal_of(error)
    return refusals.flaw_of(refusal, kernel.name, kernel.jaxpr, gpu=f"an {gpu.kind}").message


_ERROR = re.compile(r"^(?P<where>.*?)\berror: (?P<text>.*)$", re.MULTILINE)
_PLACE = re.compile(r'"([^"]+)"\("([^"]+\.py)":(\d+)')


def diagnostic(text: str) -> tuple[str, Site | None] | None:
    """The first error among the compiler's lines, and the line of source that it names."""
    first = _ERROR.search(text)
    if first is None:
        return None
    places = _PLACE.findall(first["where"])
    sites = (Site(file, int(line), name) for name, file, line in reversed(places))
    return first["text"], next(filter(is_kernel_code, sites), None)


def _intercept(kernel: LoweredKernel) -> cpu_kernels.Nothing | None:
    """Keeps a kernel that is to be compiled; None for one that the script itself simulates."""
    if compiling.current() is None or not _found:
        return None
    if kernel.interpret or simulating.is_simulating():
        return None
    found = _found[-1]
    # Equal calls in several programs, or in one, are one kernel.
    key = (
        kernel.name,
        _text(kernel.jaxpr),
        str(kernel.pallas_mesh),
        str(kernel.compiler_params),
        (*map(str, kernel.in_avals), *map(str, kernel.out_avals)),
        (kernel.axis_names, kernel.axis_sizes, kernel.reverse),
    )
    known = found.setdefault(key, FoundKernel(kernel=kernel, programs=[]))
    if kernel.program not in known.programs:
        known.programs.append(kernel.program)
    return cpu_kernels.Nothing()


cpu_kernels.install_kernel_interception(_intercept)
