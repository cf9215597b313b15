"""One problem to time, made from an operation's record: operands, work, and how to call it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.cases.meshes import AXIS
from stretto.benchmarks.errors import UnavailableError
from stretto.distributed.devices.axes import AxisNames
from stretto.kernels.operation import Operand, Operation, Sizes
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One problem to time.

    Attributes:
      operation: its record.
      sizes: by name, of the whole problem, as the operation's examples have them.
      dtype: type of all elements but for operands with a type of their own; of operands in 8 bits
        it is that of the result.
      devices: the team's size.
      values: how the operands are drawn, by the name that the operation's examples have for it;
        "" for their usual way.
    """

    operation: Operation
    sizes: Sizes
    dtype: str
    devices: int
    values: str = ""

    def __str__(self) -> str:
        drawn = f", {self.values}" if self.values else ""
        return f"{self.operation.name} {self.shape} {self.dtype}{drawn} on {self.devices}"

    @property
    def shape(self) -> str:
        """The sizes in words, such as "8192x8192x28672"."""
        return shapes.text_of(self.sizes)

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, int, str]:
        """The key of the case; its measurement has the same."""
        sizes = tuple(self.sizes.values())
        return (self.operation.name, sizes, self.dtype, self.devices, self.values)

    def check(self) -> None:
        """Raises UnavailableError if the sizes cannot be cut into the devices' shares."""
        for name, size, divisor in self.operation.examples.needs(self.sizes, self.devices):
            if size % divisor:
                raise UnavailableError(f"{name}={size} is not a multiple of {divisor}")

    def call(
        self, backend: str, config: Any = None, *, axes: AxisNames = AXIS
    ) -> Callable[..., jax.Array]:
        """The function to time: the call of `call_of`, or its derivative."""
        passed: dict[str, Any] = {n: self.sizes[n] for n in self.operation.examples.passed}
        passed |= self.operation.examples.keywords_of(self.sizes)
        call = call_of(self.operation, backend, config, axes=axes, **passed)
        return self.operation.examples.timed(self.sizes, call)

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of one device."""
        examples = self.operation.examples
        make = examples.values[self.values] if self.values else examples.operands
        return make(self.sizes, self.devices)

    def problem(self, machine: Machine) -> Problem:
        """The case as the choice of an implementation sees it, on such devices."""
        lhs, rhs, *_ = (*(operand.dtype or self.dtype for operand in self.operands), None, None)
        return Problem(
            operation=self.operation.name,
            sizes=self.operation.examples.problem(self.sizes, self.devices),
            types=Types(
                lhs=lhs or self.dtype,
                rhs=rhs,
                out=self.dtype,
                scales=self.operation.examples.scales,
            ),
            devices=self.devices,
            machine=machine,
        )

    @functools.cached_property
    def work(self) -> Work:
        """The case's work on one device."""
        return self.operation.work(self.problem(Machine(platform="gpu", kind="any")))

    @property
    def needs_kernel(self) -> bool:
        """Whether a kernel of Stretto can serve it: one device needs none that communicates."""
        return self.devices > 1 or not self.operation.communicates

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes that nccl-tests calls the size of the collective inside, 0 without one."""
        return self.work.traffic.size if self.work.traffic is not None else 0

    @property
    def footprint(self) -> int:
        """Bytes of one device's operands, gathered or partial tensor, and result.

        The peers that time the matmul alone hold a gathered operand of their own.
        """
        found = sum(bytes_of(operand, self.dtype) for operand in self.operands) + self.size
        if self.work.product is None:
            return found
        m, _, n = self.work.product
        traffic = self.work.traffic
        gathered = traffic.size if traffic is not None and traffic.gathers else 0
        return found + m * n * self.itemsize + gathered


def call_of(
    operation: Operation,
    backend: str,
    config: Any = None,
    *,
    axes: AxisNames = AXIS,
    **passed: Any,
) -> Callable[..., jax.Array]:
    """The public operation, as a function of one device's operands inside `shard_map`.

    Args:
      operation: its record, whose examples have its further arguments.
      backend, config: as the operation takes them.
      axes: the mesh axes of the team.
      **passed: keyword arguments that come from the sizes.
    """
    keywords = dict(operation.examples.keywords, backend=backend, **passed)
    named = operation.examples.named
    if config is not None:
        keywords["config"] = config
    team = (axes,) if operation.communicates else ()

    def call(*operands: jax.Array) -> jax.Array:
        count = len(operands) - len(named)
        more = dict(zip(named, operands[count:], strict=True))
        return operation.public(*operands[:count], *team, **keywords, **more)

    return call


def bytes_of(operand: Operand, dtype: str) -> int:
    """Bytes of one device's `operand`, where elements without a type of their own are `dtype`."""
    count = 1
    for size in operand.shape:
        count *= size
    return count * jnp.dtype(operand.dtype or dtype).itemsize
