"""Jaxprs prepared for interpretation: each equation becomes a closure over slots of a list."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.sites import UNKNOWN_SITE, Site, is_kernel_code, site_of

type Env = list
type Step = tuple[bool, Callable]
"""Whether the closure is a generator function, and the closure of (task, env)."""

type Rule = Callable[[Compiler, Any], Step | None]

RULES: dict[str, Rule] = {}
"""What to do with each primitive, by its name."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function of (compiler, equation) as the rule of the primitives called `names`."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@dataclass
class Program:
    """A prepared jaxpr.

    Attributes:
      template: the environment before the first step; literals are already in place.
      inputs, outputs: slots of the arguments (constants first) and of the results.
      steps: the equations, in order.
      yields: some step lets other tasks run, so the program must be run as a generator.
    """

    template: list
    inputs: list[int]
    outputs: list[int]
    steps: list[Step] = field(default_factory=list)
    yields: bool = False

    def run(self, task: Any, args: list) -> Generator[Any, None, list]:
        """Runs the program as a generator, which yields where other tasks may run."""
        env = self.template.copy()
        for slot, value in zip(self.inputs, args, strict=True):
            env[slot] = value
        for yields, step in self.steps:
            if yields:
                yield from step(task, env)
            else:
                step(task, env)
        return [env[slot] for slot in self.outputs]

    def run_now(self, task: Any, args: list) -> list:
        """Runs a program that never yields."""
        env = self.template.copy()
        for slot, value in zip(self.inputs, args, strict=True):
            env[slot] = value
        for _, step in self.steps:
            step(task, env)
        return [env[slot] for slot in self.outputs]


@dataclass
class KernelInfo:
    """What is known of a kernel as a whole while it is prepared.

    Attributes:
      name: the kernel's name.
      mesh: the Pallas mesh: grid, cluster and threads.
      axis_sizes: sizes of the axes of the device mesh, in order.
      communicates: it asks where its device is among others, or reaches another one.
      num_globals: how many semaphore arrays `get_global` has asked for.
      semaphore_names: the names that the kernel gives to semaphores, by their tags.
      signal_sites: for each semaphore tag, the lines that signal it.
    """

    name: str
    mesh: Any
    axis_sizes: dict[Any, int]
    communicates: bool = False
    num_globals: int = 0
    semaphore_names: dict[Any, str] = field(default_factory=dict)
    signal_sites: dict[Any, list[Site]] = field(default_factory=dict)


class Compiler:
    """Prepares one jaxpr; nested jaxprs get compilers of their own.

    Args:
      kernel: the kernel that the jaxpr is part of.
      jaxpr: what to prepare.
      tags: for each argument (constants first) what it is known to be before anything runs, such as
        the semaphore array that `get_global` made; None where nothing is known.
      consts: values of the jaxpr's constants; if None, they are its first arguments.
    """

    def __init__(
        self,
        kernel: KernelInfo,
        jaxpr: Any,
        tags: list | None = None,
        consts: list | None = None,
    ):
        self.kernel = kernel
        self.template: list = []
        self.slots: dict[Any, int] = {}
        self.tags: dict[Any, Any] = {}
        self.site: Site = UNKNOWN_SITE
        if consts is not None:
            for variable, value in zip(jaxpr.constvars, consts, strict=True):
                self.template[self._new_slot(variable)] = from_literal(value, variable.aval)
        variables = [*(jaxpr.constvars if consts is None else ()), *jaxpr.invars]
        self.used = _used_variables(jaxpr)
        self.program = Program(self.template, [self._new_slot(v) for v in variables], [])
        for variable, tag in zip(variables, tags or [None] * len(variables), strict=True):
            if tag is not None:
                self.tags[variable] = tag
        for eqn in jaxpr.eqns:
            self._add(eqn)
        self.program.outputs = [self.slot(v) for v in jaxpr.outvars]

    def _add(self, eqn: Any) -> None:
        name = eqn.primitive.name
        name = name if name in RULES else name.removesuffix("_p")
        self.site = site_of(eqn)
        if name not in RULES:
            raise self._unsupported(
                f"kernel {self.kernel.name}: the simulator does not know the primitive {name!r},"
                f" used at {self.site}."
            )
        try:
            step = RULES[name](self, eqn)
        except UnsupportedKernelError as error:
            if error.site is None:
                text = f"kernel {self.kernel.name}: {error} ({name!r} used at {self.site})"
            elif is_kernel_code(self.site) and not is_kernel_code(error.site):
                text = f"{error}, in {self.site}"
            else:
                raise
            raise self._unsupported(text) from error
        if step is not None:
            self.program.steps.append(step)
            self.program.yields |= step[0]

    def _unsupported(self, text: str) -> UnsupportedKernelError:
        error = UnsupportedKernelError(text)
        error.site = self.site
        return error

    def _new_slot(self, variable: Any) -> int:
        self.slots[variable] = len(self.template)
        self.template.append(None)
        return self.slots[variable]

    def slot(self, atom: Any) -> int:
        """The slot that holds a variable or a literal of the jaxpr."""
        if hasattr(atom, "val"):
            self.template.append(from_literal(atom.val, atom.aval))
            return len(self.template) - 1
        return self.slots[atom] if atom in self.slots else self._new_slot(atom)

    def ins(self, eqn: Any) -> list[int]:
        """Slots of all operands of `eqn`."""
        return [self.slot(v) for v in eqn.invars]

    def outs(self, eqn: Any) -> list[int]:
        """Slots of all results of `eqn`."""
        return [self.slot(v) for v in eqn.outvars]

    def reader(self, atom: Any) -> Callable[[Env], Any]:
        """A function that reads `atom`, which may be a constant, from an environment."""
        if hasattr(atom, "aval") or hasattr(atom, "val"):
            slot = self.slot(atom)
            return lambda env: env[slot]
        constant = atom.item() if isinstance(atom, np.ndarray | np.generic) else atom
        return lambda env: constant

    def device_reader(self, device_id: Any, id_type: Any) -> Callable[[Any, Env], int]:
        """A function of (task, env) to the linear index of the device that `device_id` names."""
        self.kernel.communicates = True
        if isinstance(device_id, dict):
            axes = [(k, self.reader(v)) for k, v in device_id.items()]
            return lambda task, env: task.machine.mesh.linear_from_axes(
                task.device.index, {k: int(read(env)) for k, read in axes}
            )
        if isinstance(device_id, tuple | list):
            readers = [self.reader(d) for d in device_id]
            return lambda task, env: task.machine.mesh.linear([int(r(env)) for r in readers])
        read = self.reader(device_id)
        if getattr(id_type, "value", "mesh") == "logical" or len(self.kernel.axis_sizes) <= 1:
            return lambda task, env: task.machine.mesh.called(int(read(env)))
        raise UnsupportedKernelError(
            f"a bare device id needs a mesh of one axis, not {list(self.kernel.axis_sizes)}"
        )

    def multicast_axes(self, axes: Any) -> tuple:
        """The axes along which an equation reaches every device, as a tuple."""
        self.kernel.communicates = True
        return tuple(axes) if isinstance(axes, tuple | list) else (axes,)

    def is_used(self, variable: Any) -> bool:
        """Whether anything reads `variable`."""
        return variable in self.used

    def sub(
        self,
        jaxpr: Any,
        operands: list | None = None,
        tags: list | None = None,
        *,
        consts_are_operands: bool = False,
    ) -> Program:
        """Prepares a nested jaxpr.

        Args:
          jaxpr: the jaxpr, with or without its constants.
          operands: the atoms that it will be called with, to pass their tags on.
          tags: those tags, instead of `operands`.
          consts_are_operands: the first operands stand for the jaxpr's constants.
        """
        site = self.site
        if tags is None and operands is not None:
            tags = [self.tag(v) for v in operands]
        consts = None if consts_are_operands else list(getattr(jaxpr, "consts", ()))
        inner = jaxpr if hasattr(jaxpr, "constvars") else jaxpr.jaxpr
        program = Compiler(self.kernel, inner, tags, consts).program
        self.site = site
        return program

    def tag(self, atom: Any) -> Any:
        """What is known of `atom` before anything runs."""
        return None if hasattr(atom, "val") else self.tags.get(atom)


def from_literal(value: Any, aval: Any) -> Any:
    """A constant of a jaxpr as the interpreter holds it: scalars as Python's own where possible."""
    array = np.asarray(value, getattr(aval, "dtype", None))
    return to_scalar(array) if array.ndim == 0 else array


def to_scalar(array: np.ndarray) -> Any:
    """A 0-d array as the interpreter holds it: int, bool, or a numpy float."""
    return array.item() if array.dtype.kind in "iub" else array[()]


def _used_variables(jaxpr: Any) -> set:
    used = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for eqn in jaxpr.eqns:
        used.update(v for v in eqn.invars if not hasattr(v, "val"))
    return used
