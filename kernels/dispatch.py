"""Which implementation serves a call, and why: the one place where `backend` is decided."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed import clique, jax_options, simulator, topology
from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels import nodes, tables
from stretto.kernels.checks import check_backend

HOPPER = ("H100", "H200", "H800", "H20", "GH200")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, as far as the choice of its implementation depends on it.

    `m`, `k`, `n` are the whole problem's sizes (for a collective: rows of one device's operand, 0,
    and elements of such a row), `devices` the team's size, `platform` and `device_kind` what the
    enclosing mesh is made of.
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
    microseconds that the choice rests on, None where they are not known. Where the team spans
    nodes and a kernel serves within each, `split` says which axes lie within a node.
    """

    problem: Problem
    backend: str
    reason: str
    config: Any = None
    fused_us: float | None = None
    xla_us: float | None = None
    split: topology.Split | None = None

    @property
    def interpret(self) -> Any:
        """What the kernel's launch takes as `interpret`."""
        return simulator.SimulatorParams() if self.backend == "simulator" else None

    def __str__(self) -> str:
        times = [
            f"{name} {us:.0f} us"
            for name, us in (("fused", self.fused_us), ("XLA", self.xla_us))
            if us is not None
        ]
        return f"{self.problem}: {self.backend}, because {self.reason}" + (
            f" ({', '.join(times)})" if times else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which implementation should be faster, and why; times in microseconds, where estimated."""

    backend: str
    reason: str
    fused_us: float | None = None
    xla_us: float | None = None


class Kernel(Protocol):
    """What a kernel's module offers to the choice.

    `Config` is the type of its configurations, which the tuned tables hold.
    """

    @property
    def Config(self) -> type:
        """The type of its configurations."""
        ...

    def unsupported(self, problem: Problem, config: Any) -> str | None:
        """Why the kernel cannot serve `problem`, or None if it can."""
        ...

    def default_config(self, problem: Problem) -> Any:
        """The configuration for a problem that no table has."""
        ...

    def judge(self, problem: Problem) -> Verdict:
        """Which implementation should be faster, by an analysis of sizes and rates."""
        ...


def platform_of_mesh() -> tuple[str, str]:
    """(`platform`, `device_kind`) of the enclosing mesh, or of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform:
        return _canonical(device.platform), device.device_kind
    local = jax.devices()[0]
    return _canonical(local.platform), local.device_kind


def _canonical(platform: str) -> str:
    return "gpu" if platform in ("cuda", "gpu") else platform


_recorded: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Keeps every choice that is made inside it, in order."""
    choices: list[Choice] = []
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def choose(
    problem: Problem,
    backend: str,
    kernel: Kernel,
    config: Any = None,
    *,
    axes: tuple[Hashable, ...] = (),
) -> Choice:
    """Decides the implementation of `problem`.

    Args:
      problem: the call.
      backend: what the caller asked for.
      kernel: the module of the fused kernel, or an object like one.
      config: the caller's configuration of it, or None.
      axes: of the enclosing mesh, which the team lies along.

    Raises:
      ValueError: `backend` is unknown, or `config` does not fit the problem.
      BackendUnavailableError: `backend` names an implementation that cannot serve the problem.
    """
    choice = _choose(problem, backend, kernel, config, axes)
    choices = _recorded.get()
    if choices is not None:
        choices.append(choice)
    return choice


def _choose(
    problem: Problem, backend: str, kernel: Kernel, config: Any, axes: tuple[Hashable, ...]
) -> Choice:
    check_backend(backend)
    _check_config(problem.op, kernel, config)
    if backend == "xla":
        return Choice(problem=problem, backend="xla", reason="it was asked for")
    if problem.devices == 1:
        return Choice(problem=problem, backend="xla", reason="a team of one has nobody to talk to")
    if (unordered := clique.order_obstacle_of_trace()) is not None:
        return _fall_back(problem, backend, unordered)
    split = topology.split(axes)
    if split.outer:
        return _choose_across_nodes(problem, backend, kernel, config, split)
    if isinstance(config, nodes.Config):
        config = config.kernel
    simulated = backend == "simulator" or simulator.is_simulating()
    obstacle = kernel.unsupported(problem, config)
    if obstacle is None and not simulated:
        obstacle = _unsuitable_devices(problem)
    if obstacle is not None:
        return _fall_back(problem, backend, obstacle)
    if simulated:
        reason = "it was asked for" if backend != "auto" else "a simulation encloses the call"
        config = config or kernel.default_config(problem)
        return Choice(problem=problem, backend="simulator", reason=reason, config=config)
    if config is not None:
        return Choice(problem=problem, backend="pallas", reason="a config was given", config=config)
    if backend == "pallas":
        # Without a table there is nothing to warn of: the kernel was asked for.
        found = _measured(problem, kernel) if tables.exists(problem.device_kind) else None
        config = found.config if found else kernel.default_config(problem)
        return Choice(problem=problem, backend="pallas", reason="it was asked for", config=config)
    return _faster(problem, kernel)


def _check_config(op: str, kernel: Kernel, config: Any) -> None:
    """Raises ValueError unless `config` is the kernel's own, or has it."""
    own = config.kernel if isinstance(config, nodes.Config) else config
    if own is not None and not isinstance(own, kernel.Config):
        raise ValueError(
            f"{op}: config={own!r} is a {type(own).__module__}.{type(own).__qualname__}; pass a"
            f" {kernel.Config.__module__}.{kernel.Config.__qualname__}, or None."
        )


def _fall_back(problem: Problem, backend: str, obstacle: str) -> Choice:
    """XLA, for the reason that no kernel can serve; an error if a kernel was asked for."""
    if backend != "auto":
        raise BackendUnavailableError(
            f"{problem.op}: backend={backend!r} cannot serve this call: {obstacle}"
            " Pass backend='auto' to fall back on XLA."
        )
    return Choice(problem=problem, backend="xla", reason=obstacle)


def _choose_across_nodes(
    problem: Problem, backend: str, kernel: Kernel, config: Any, split: topology.Split
) -> Choice:
    """XLA between nodes and a kernel within each, where the kernel's part is one for it."""
    within = _within(problem, split)
    if within is None:
        return _fall_back(problem, backend, str(topology.obstacle(split.outer + split.inner)))
    if isinstance(config, nodes.Config):
        config = config.kernel
    choice = _choose(within, backend, kernel, config, split.inner)
    part = f"axis {topology.names_of(split.outer)} joins nodes, and for the part within each"
    return dataclasses.replace(
        choice,
        problem=problem,
        split=None if choice.backend == "xla" else split,
        reason=f"{part}, {within}, {choice.reason}",
        fused_us=None,
        xla_us=None,
    )


def _within(problem: Problem, split: topology.Split) -> Problem | None:
    """The part of `problem` that a kernel serves within a node, None if there is none.

    There is none if no axes lie within a node, or if the operation has no hierarchical version.
    """
    devices = lax.axis_size(split.inner) if split.inner else 1
    if problem.op not in nodes.DIVIDED or devices == 1:
        return None
    count = problem.devices // devices
    divided = {name: -(-getattr(problem, name) // count) for name in nodes.DIVIDED[problem.op]}
    return dataclasses.replace(problem, devices=devices, **divided)


def _measured(problem: Problem, kernel: Kernel) -> tables.Found | None:
    """What the table of this type of GPU says of `problem`."""
    itemsize = jnp.dtype(problem.dtype).itemsize
    return tables.look_up(problem, kernel.Config, itemsize)  # pyright: ignore[reportArgumentType]


def _faster(problem: Problem, kernel: Kernel) -> Choice:
    """The implementation that is faster: as measured, or by an estimate of sizes and rates."""
    found = _measured(problem, kernel)
    if found:
        return Choice(problem=problem, **dataclasses.asdict(found) | {"config": found.config})
    verdict = kernel.judge(problem)
    return Choice(problem=problem, config=kernel.default_config(problem), **vars(verdict))


def _unsuitable_devices(problem: Problem) -> str | None:
    if problem.platform != "gpu":
        return f"the devices are {problem.platform}, not GPUs."
    if not any(name in problem.device_kind for name in HOPPER):
        return f"the kernels are written for Hopper GPUs and these are {problem.device_kind}."
    return jax_options.why_kernels_are_recorded()
