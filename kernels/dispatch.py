"""Which implementation serves a call, and why: the one place where `backend` is decided."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels.checks import check_backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, as far as the choice of its implementation depends on it.

    `m`, `k`, `n` are the whole problem's sizes (for a collective: rows, 0, columns), `devices` the
    team's size, `platform` and `device_kind` what the enclosing mesh is made of.
    """

    op: str
    m: int
    k: int
    n: int
    dtype: str
    out_dtype: str
    devices: int
    platform: str
    device_kind: str

    def __str__(self) -> str:
        size = f"{self.m}x{self.k}x{self.n}" if self.k else f"{self.m}x{self.n}"
        return f"{self.op} {size} {self.dtype} on {self.devices} x {self.device_kind}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation that a call takes: what `stretto.explain` returns.

    `backend` is "pallas", "xla" or "simulator"; `fused_us` and `xla_us` are the times in
    microseconds that the choice rests on, None where they are not known.
    """

    problem: Problem
    backend: str
    reason: str
    config: Any = None
    fused_us: float | None = None
    xla_us: float | None = None

    def __str__(self) -> str:
        times = [
            f"{name} {us:.0f} us"
            for name, us in (("fused", self.fused_us), ("XLA", self.xla_us))
            if us is not None
        ]
        return f"{self.problem}: {self.backend}, because {self.reason}" + (
            f" ({', '.join(times)})" if times else ""
        )


def platform_of_mesh() -> tuple[str, str]:
    """(`platform`, `device_kind`) of the enclosing mesh, or of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform:
        return _canonical(device.platform), device.device_kind
    local = jax.devices()[0]
    return _canonical(local.platform), local.device_kind


def _canonical(platform: str) -> str:
    return "gpu" if platform in ("cuda", "gpu") else platform


def choose(
    problem: Problem, backend: str, *, unsupported: str | None, simulating: bool, tuned: Any = None
) -> Choice:
    """Decides the implementation of `problem`.

    Args:
      problem: the call.
      backend: what the caller asked for.
      unsupported: why the fused kernel cannot serve the problem, or None if it can.
      simulating: whether a `stretto.simulate` context encloses the call.
      tuned: called with `problem`, returns a `Choice` from tables or from analysis.

    Raises:
      ValueError: `backend` is unknown.
      BackendUnavailableError: `backend` names an implementation that cannot serve the problem.
    """
    check_backend(backend)
    if backend == "xla":
        return Choice(problem=problem, backend="xla", reason="it was asked for")
    on_gpu = problem.platform == "gpu"
    if backend in ("pallas", "simulator"):
        if unsupported is not None:
            raise BackendUnavailableError(
                f"{problem.op}: backend={backend!r} cannot serve this call: {unsupported}"
            )
        if backend == "simulator" or simulating:
            return Choice(problem=problem, backend="simulator", reason="it was asked for")
        if not on_gpu:
            raise BackendUnavailableError(
                f"{problem.op}: backend='pallas' needs GPUs of compute capability 9.0 and the mesh"
                f" is made of {problem.platform} devices; use backend='simulator' or 'auto'."
            )
        return Choice(problem=problem, backend="pallas", reason="it was asked for")
    if unsupported is not None:
        return Choice(problem=problem, backend="xla", reason=unsupported)
    if simulating:
        return Choice(problem=problem, backend="simulator", reason="a simulation encloses the call")
    if not on_gpu:
        return Choice(
            problem=problem, backend="xla", reason=f"the devices are {problem.platform}, not GPUs"
        )
    if tuned is None:
        return Choice(problem=problem, backend="pallas", reason="the fused kernel serves the call")
    return tuned(problem)
