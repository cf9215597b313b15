"""Which implementation serves a call, and why: the one place where `backend` is decided."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jax import lax

from stretto.distributed import compiling, recording, simulating
from stretto.distributed.devices import topology
from stretto.distributed.errors import BackendUnavailableError
from stretto.distributed.private_jax import options
from stretto.kernels.choice import obstacles, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.speed import (
    UNTRIED,
    best_config,
    faster,
    recorded_program,
    through_heap,
)
from stretto.kernels.operation import Axes, Kernel, Operation
from stretto.kernels.problem import machine, node_config
from stretto.kernels.problem.checks import check_backend
from stretto.kernels.problem.fields import check_fields
from stretto.kernels.problem.problem import Problem

RECORDED = "a recorded program has no kernel that reads its peers' operands."
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
      operation: the called operation.
      problem: the call.
      backend: the caller's `backend`.
      config: the caller's configuration of the fused kernel, or None.
      axes: the mesh axes of the team.
      obstacle: why no kernel can serve this call, by the operation's own checks.
      remark: a further sentence on the choice, beside its reason.

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
        choice = dataclasses.replace(choice, reason=f"{choice.reason.removesuffix('.')}; {said}")
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
    choice = functools.partial(Choice, problem=problem, kernel=kernel)
    if simulated:
        reason = "it was asked for" if backend != "auto" else "a simulation encloses the call"
        return choice(backend="simulator", reason=reason, config=config or kernel.default(problem))
    if config is not None:
        reason = f"a config was given{_caution(problem)}"
        return choice(backend="pallas", reason=reason, config=config)
    if backend == "pallas" or compiling.current() is not None:
        why = "it was asked for" if backend == "pallas" else "kernels are being compiled"
        return choice(
            backend="pallas",
            reason=f"{why}{_caution(problem)}",
            config=best_config(operation, kernel, problem),
        )
    if recording.is_active() and operation.communicates:
        return recorded_program(operation, kernel, problem)
    return through_heap(operation, problem) or faster(operation, kernel, problem)


def serving(
    operation: Operation, problem: Problem, config: Any = None
) -> tuple[Kernel, str | None]:
    """The first kernel without an obstacle, or the first kernel and its obstacle.

    Where a configuration is given, of the kernels that it belongs to; in a recorded program, of
    those that may be recorded.

    Raises:
      ValueError: the configuration does not fit the problem.
    """
    kernels = [k for k in operation.kernels if config is None or isinstance(config, k.Config)]
    if recording.is_active() and operation.communicates:
        kernels = [kernel for kernel in kernels if kernel.recorded_to is not None]
        if not kernels:
            return operation.kernels[0], RECORDED
    obstacles = [kernel.obstacle(problem) for kernel in kernels]
    kernel = kernels[obstacles.index(None)] if None in obstacles else kernels[0]
    obstacle = None if None in obstacles else obstacles[0]
    if obstacle is None and config is not None:
        config.check(problem)
    return kernel, obstacle


def _check_config(operation: Operation, config: Any) -> None:
    """Raises ValueError unless `config` is of one of the operation's kernels, or has such a one.

    And for a field of another type than it is annotated with.
    """
    own = config.kernel if isinstance(config, node_config.Config) else config
    types = tuple(kernel.Config for kernel in operation.kernels)
    if own is not None and not isinstance(own, types):
        wanted = " or a ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in types)
        raise ValueError(
            f"{operation.name}: config={own!r:.60} is a {type(own).__module__}."
            f"{type(own).__qualname__}; pass a {wanted}, or None."
        )
    if config is not None:
        check_fields(config)


def _fall_back(problem: Problem, backend: str, obstacle: str) -> Choice:
    """XLA, because no kernel can serve; an error if the caller requires a kernel."""
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

    None if no axes are within a node, or if the operation has no hierarchical version.
    """
    devices = lax.axis_size(split.inner) if split.inner else 1
    if operation.between_nodes is None or devices == 1:
        return None
    count = problem.devices // devices
    divided = {name: -(-problem.sizes[name] // count) for name in operation.between_nodes.divided}
    return dataclasses.replace(problem.resized(**divided), devices=devices)


def _caution(problem: Problem) -> str:
    """A warning for the caller of a kernel that was never run on such a GPU."""
    found = problem.machine
    if found.architecture not in UNTRIED or tables.exists(found.kind):
        return ""
    return "; it was compiled and simulated for such a GPU, but never run on one"


def _unsuitable_devices(problem: Problem) -> str | None:
    found = problem.machine
    if found.platform != "gpu":
        return f"the devices are {found.platform}, not GPUs."
    if found.architecture not in (machine.HOPPER, machine.BLACKWELL):
        return f"the kernels are written for Hopper and Blackwell GPUs and these are {found.kind}."
    return options.why_kernels_are_recorded()
