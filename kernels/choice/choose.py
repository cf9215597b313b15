"""Which implementation serves a call, and why: the one place where `backend` is decided."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jax import lax

from stretto.distributed import compiling, simulating
from stretto.distributed.devices import topology
from stretto.distributed.errors import BackendUnavailableError
from stretto.distributed.private_jax import options
from stretto.kernels.choice import costs, obstacles, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Axes, Kernel, Operation
from stretto.kernels.problem import machine, node_config
from stretto.kernels.problem.checks import check_backend
from stretto.kernels.problem.problem import Problem

UNTRIED = (machine.BLACKWELL,)
"""Architectures that kernels are built for and have never been run on. Only what a table has been
measured to be faster is taken there."""

type Remark = Callable[[Choice], str | None]

_recorded: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


def nothing_to_say(choice: Choice) -> None:
    """The remark of a call whose reason says all."""
    del choice


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
    operation: Operation,
    problem: Problem,
    backend: str,
    config: Any = None,
    *,
    axes: Axes = (),
    obstacle: str | None = None,
    remark: Remark = nothing_to_say,
) -> Choice:
    """Decides the implementation of `problem`.

    Args:
      operation: what is called.
      problem: the call.
      backend: what the caller asked for.
      config: the caller's configuration of the fused kernel, or None.
      axes: of the enclosing mesh, which the team lies along.
      obstacle: why no kernel can serve this call, as far as its operation knows.
      remark: what there is to say of the choice besides its reason.

    Raises:
      ValueError: `backend` is unknown, or `config` does not fit the problem.
      BackendUnavailableError: `backend` names an implementation that cannot serve the problem.
    """
    check_backend(backend)
    _check_config(operation, config)
    choice = _choose(operation, problem, backend, config, axes, obstacle)
    if problem.copied and choice.backend != "xla":
        said = f"{choice.reason}; {problem.copied / 2**20:.3g} MiB are copied to put rows in order"
        choice = dataclasses.replace(choice, reason=said)
    if (said := remark(choice)) is not None:
        choice = dataclasses.replace(choice, reason=f"{choice.reason}; {said}")
    choices = _recorded.get()
    if choices is not None:
        choices.append(choice)
    return choice


def _choose(
    operation: Operation,
    problem: Problem,
    backend: str,
    config: Any,
    axes: tuple[Hashable, ...],
    obstacle: str | None = None,
) -> Choice:
    if backend == "xla":
        return Choice(problem=problem, backend="xla", reason="it was asked for")
    if problem.devices == 1 and operation.communicates:
        return Choice(problem=problem, backend="xla", reason="one device needs no communication")
    if (obstacle := obstacle or obstacles.of_call(operation, problem, axes)) is not None:
        return _fall_back(problem, backend, obstacle)
    split = topology.split(axes)
    if split.outer:
        return _choose_across_nodes(operation, problem, backend, config, split)
    if isinstance(config, node_config.Config):
        config = config.kernel
    simulated = backend == "simulator" or simulating.is_simulating()
    kernel, obstacle = serving(operation, problem, config)
    if obstacle is None and not simulated:
        obstacle = _unsuitable_devices(problem)
    if obstacle is not None:
        return _fall_back(problem, backend, obstacle)
    if simulated:
        reason = "it was asked for" if backend != "auto" else "a simulation encloses the call"
        return Choice(
            problem=problem,
            backend="simulator",
            reason=reason,
            kernel=kernel,
            config=config or kernel.default(problem),
        )
    if config is not None:
        return Choice(
            problem=problem,
            backend="pallas",
            reason=f"a config was given{_caution(problem)}",
            kernel=kernel,
            config=config,
        )
    if backend == "pallas" or compiling.current() is not None:
        asked = backend == "pallas"
        return Choice(
            problem=problem,
            backend="pallas",
            reason=("it was asked for" if asked else "kernels are being compiled")
            + _caution(problem),
            kernel=kernel,
            config=_best_config(operation, kernel, problem),
        )
    return faster(operation, kernel, problem)


def serving(
    operation: Operation, problem: Problem, config: Any = None
) -> tuple[Kernel, str | None]:
    """The first kernel without an obstacle, or the first kernel and its obstacle.

    Where a configuration is given, of the kernels that it belongs to.

    Raises:
      ValueError: the configuration does not fit the problem.
    """
    kernels = [k for k in operation.kernels if config is None or isinstance(config, k.Config)]
    obstacles = [kernel.obstacle(problem) for kernel in kernels]
    kernel = kernels[obstacles.index(None)] if None in obstacles else kernels[0]
    obstacle = None if None in obstacles else obstacles[0]
    if obstacle is None and config is not None:
        config.check(problem)
    return kernel, obstacle


def _check_config(operation: Operation, config: Any) -> None:
    """Raises ValueError unless `config` is of one of the operation's kernels, or has such a one."""
    own = config.kernel if isinstance(config, node_config.Config) else config
    types = tuple(kernel.Config for kernel in operation.kernels)
    if own is not None and not isinstance(own, types):
        wanted = " or a ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in types)
        raise ValueError(
            f"{operation.name}: config={own!r:.60} is a {type(own).__module__}."
            f"{type(own).__qualname__}; pass a {wanted}, or None."
        )


def _fall_back(problem: Problem, backend: str, obstacle: str) -> Choice:
    """XLA, for the reason that no kernel can serve; an error if a kernel was asked for."""
    if backend != "auto":
        raise BackendUnavailableError(
            f"{problem.operation}: backend={backend!r} cannot serve this call: {obstacle}"
            " Pass backend='auto' to fall back on XLA."
        )
    return Choice(problem=problem, backend="xla", reason=obstacle)


def _choose_across_nodes(
    operation: Operation, problem: Problem, backend: str, config: Any, split: topology.Split
) -> Choice:
    """XLA between nodes and a kernel within each, where the kernel's part is one for it."""
    within = _within(operation, problem, split)
    if within is None:
        return _fall_back(problem, backend, str(topology.obstacle(split.outer + split.inner)))
    if isinstance(config, node_config.Config):
        config = config.kernel
    choice = _choose(operation, within, backend, config, split.inner)
    between = f"axis {topology.names_of(split.outer)} joins nodes, and for the part within each"
    return dataclasses.replace(
        choice,
        problem=problem,
        split=None if choice.backend == "xla" else split,
        reason=f"{between}, {within}, {choice.reason}",
        fused_us=None,
        xla_us=None,
    )


def _within(operation: Operation, problem: Problem, split: topology.Split) -> Problem | None:
    """The part of `problem` that a kernel serves within a node, None if there is none.

    There is none if no axes lie within a node, or if the operation has no hierarchical version.
    """
    devices = lax.axis_size(split.inner) if split.inner else 1
    if operation.between_nodes is None or devices == 1:
        return None
    count = problem.devices // devices
    divided = {name: -(-problem.sizes[name] // count) for name in operation.between_nodes.divided}
    return dataclasses.replace(problem.resized(**divided), devices=devices)


def faster(operation: Operation, kernel: Kernel, problem: Problem) -> Choice:
    """The implementation that is faster: as measured, or by an estimate of sizes and rates."""
    if problem.copied:
        return _with_copies(operation, kernel, problem)
    kind, untried = problem.machine.kind, problem.machine.architecture in UNTRIED
    unknown = untried or kernel.untried
    found = _look_up(operation, kernel, problem) if not unknown or tables.exists(kind) else None
    if found is not None:
        return found
    if unknown:
        where = "run on such a GPU" if untried else "timed beside XLA on several GPUs"
        reason = (
            f"the fused kernels were never {where}, and no table of {kind} says that"
            " they are faster for this call; `stretto tune` writes one"
        )
        config = _best_config(operation, kernel, problem)
        return Choice(problem=problem, backend="xla", reason=reason, kernel=kernel, config=config)
    if kernel.fused_from is not None:
        choice = costs.by_size(kernel.fused_from, operation.work(problem))
    else:
        choice = costs.compare(estimate(operation, kernel, problem))
    return Choice(
        problem=problem, kernel=kernel, config=_best_config(operation, kernel, problem), **choice
    )


def _with_copies(operation: Operation, kernel: Kernel, problem: Problem) -> Choice:
    """The faster one where the kernel's operands or results have to be copied besides."""
    plain = faster(operation, kernel, dataclasses.replace(problem, copied=0))
    if problem.machine.architecture in UNTRIED and plain.backend == "xla":
        return dataclasses.replace(plain, problem=problem)
    fused_us, xla_us = plain.fused_us, plain.xla_us
    if fused_us is None or xla_us is None:
        fused_us, xla_us = estimate(operation, kernel, problem)
    fused_us += costs.moved_in_memory_us(problem.copied)
    is_fused = plain.backend == "pallas" and fused_us < xla_us
    return dataclasses.replace(
        plain,
        problem=problem,
        backend="pallas" if is_fused else "xla",
        reason=f"{plain.reason}, but for the copies" if not is_fused else plain.reason,
        fused_us=fused_us,
        xla_us=xla_us,
    )


def estimate(operation: Operation, kernel: Kernel, problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA): by sizes and rates.

    For a kernel that stands for another problem: that one's, as measured where a table has them,
    and what the fused kernel's operands cost to be laid out.
    """
    if kernel.stands_for is None:
        return costs.estimate(operation.work(problem), problem.machine)
    other, moved = kernel.stands_for(problem)
    found = _measured(operation, kernel, problem)
    if found is not None and found.fused_us and found.xla_us:
        fused_us, xla_us = found.fused_us, found.xla_us
    else:
        fused_us, xla_us = costs.estimate(operation.work(problem), other.machine)
    return fused_us + costs.moved_in_memory_us(moved), xla_us


def _caution(problem: Problem) -> str:
    """What a caller should know who asks for a kernel that nobody has run."""
    found = problem.machine
    if found.architecture not in UNTRIED or tables.exists(found.kind):
        return ""
    return "; it was compiled and simulated for such a GPU, but never run on one"


def _best_config(operation: Operation, kernel: Kernel, problem: Problem) -> Any:
    """The configuration for a problem: what a table has, or the kernel's default.

    Without a table there is nothing to warn of: only the configuration is asked for.
    """
    found = _measured(operation, kernel, problem)
    return found.config if found is not None else kernel.default(problem)


def _measured(operation: Operation, kernel: Kernel, problem: Problem) -> Choice | None:
    """What the table has of `problem`, or of the one that it is the same as."""
    if not tables.exists(problem.machine.kind):
        return None
    found = _look_up(operation, kernel, problem)
    if found is None and kernel.stands_for is not None:
        # Another operation's problem, of which this one's estimate says nothing.
        found = tables.look_up(kernel, kernel.stands_for(problem)[0])
    return found


def _look_up(operation: Operation, kernel: Kernel, problem: Problem) -> Choice | None:
    """What the table says; where shapes lie between its entries, with the operation's estimate."""
    if kernel.fused_from is not None:
        return tables.look_up(kernel, problem)
    estimated = lambda other: costs.estimate(operation.work(other), other.machine)  # noqa: E731
    return tables.look_up(kernel, problem, estimated)


def _unsuitable_devices(problem: Problem) -> str | None:
    found = problem.machine
    if found.platform != "gpu":
        return f"the devices are {found.platform}, not GPUs."
    if found.architecture not in (machine.HOPPER, machine.BLACKWELL):
        return f"the kernels are written for Hopper and Blackwell GPUs and these are {found.kind}."
    return options.why_kernels_are_recorded()
