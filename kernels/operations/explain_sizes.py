"""`stretto.explain_sizes`: what a call would take on GPUs that are not here, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from stretto.kernels.choice import by_table, choose, speed, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Operation
from stretto.kernels.operations import OPERATIONS, context_parallel
from stretto.kernels.problem.machine import BLACKWELL, HOPPER, Machine
from stretto.kernels.problem.problem import Problem, Types


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizesChoice:
    """What a call of some sizes would take; as text, with the times that are known.

    Attributes:
      choice: the implementation, and why.
      estimated_us: times of the fused kernel and of XLA by sizes and rates, in microseconds; the
        rates are those of H100s and H200s. None for a collective alone, whose choice goes by its
        size, and for GPUs that no kernel is written for.
      measured: the entry of the tuned table that is nearest, if one is near.
    """

    choice: Choice
    estimated_us: tuple[float, float] | None
    measured: Entry | None

    def __str__(self) -> str:
        lines = [str(self.choice)]
        if self.estimated_us is not None:
            fused, xla = self.estimated_us
            lines.append(f"estimated: fused {fused:.0f} us, XLA {xla:.0f} us")
        lines.append(self._said_of_measured())
        return "\n".join(lines)

    def _said_of_measured(self) -> str:
        found, kernel = self.measured, self.choice.kernel
        if found is None:
            return "measured: nothing near it"
        is_its = kernel is None or by_table.is_of(found, kernel, self.choice.problem)
        which = "fused" if is_its else "another kernel"
        times = f"{which} {found.fused_us:.0f} us, XLA {found.xla_us:.0f} us"
        return f"measured at {found.shape}: {times}"


def explain_sizes(
    operation: str,
    *,
    devices: int,
    kind: str,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
    **sizes: int,
) -> SizesChoice:
    """The choice that a call of these sizes makes on GPUs of a kind, without any.

    Args:
      operation: its name, for example "all_gather_matmul"; "all_gather_matmul_k" and
        "all_gather_matmul_n" gather along the other dimensions.
      devices: the team's size, within a node.
      kind: of GPU, by the driver's name or words of it: "NVIDIA H200", "h200".
      dtype: of the operands.
      out_dtype: of the result; `dtype` by default.
      **sizes: of the whole problem over all devices: m, k and n of a matmul; of a collective, m
        rows of one device's operand, of n elements each.

    Raises:
      ValueError: an unknown operation, type or size, or one that is missing, not positive, or no
        multiple of the devices that split it.
    """
    record = OPERATIONS.get(operation) if isinstance(operation, str) else None
    if record is None:
        known = ", ".join(OPERATIONS)
        raise ValueError(f"operation={operation!r} is not one of {known}.")
    _check_sizes(record, devices, sizes)
    if not isinstance(kind, str) or not kind.strip():
        raise ValueError(f"kind={kind!r} must be a GPU's name, or words of it, such as 'h200'.")
    lhs = _type_name("dtype", dtype)
    out = lhs if out_dtype is None else _type_name("out_dtype", out_dtype)
    problem = Problem(
        operation=operation,
        sizes={name: sizes[name] for name in record.sizes},
        types=Types(lhs=lhs, rhs=lhs if "k" in record.sizes else None, out=out),
        devices=devices,
        machine=Machine.of_kind("gpu", _known_kind(kind)),
    )
    if operation == context_parallel.OP:
        record = context_parallel.record_by_sizes(problem)
    choice = choose.choose(record, problem, "auto")
    if problem.machine.architecture not in (HOPPER, BLACKWELL):  # No kernel to estimate or to tune.
        return SizesChoice(choice=choice, estimated_us=None, measured=None)
    kernel, obstacle = choose.serving(record, problem)
    estimated = None
    is_rated = speed.why_no_estimate(problem) is None
    if obstacle is None and is_rated and speed.has_estimate(record, kernel, problem):
        estimated = speed.estimate(record, kernel, problem)
    nearest = tables.table_for(problem.machine.kind).nearest(problem)
    return SizesChoice(
        choice=choice, estimated_us=estimated, measured=nearest[0] if nearest else None
    )


def _check_sizes(record: Operation, devices: int, sizes: dict[str, Any]) -> None:
    wanted = ", ".join(record.sizes)
    if sizes.keys() != set(record.sizes):
        given = ", ".join(sizes) or "none"
        raise ValueError(f"{record.name} has the sizes {wanted}, and {given} are given.")
    for name, value in {**sizes, "devices": devices}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{record.name}: {name}={value!r} must be a whole number above 0.")
    of_whole = "k" in record.sizes  # Of a collective they are one device's.
    for name, size, divisor in record.examples.needs(sizes, devices) if of_whole else ():
        if size % divisor:
            raise ValueError(
                f"{record.name}: {name}={size} must be a multiple of {divisor}, since devices have"
                " equal parts; take the size that a call is padded to."
            )


def _type_name(what: str, name: str) -> str:
    try:
        if name is not None:  # Of which NumPy makes float64.
            return str(jnp.dtype(name))
    except TypeError:
        pass
    raise ValueError(f"{what}={name!r} is no type that JAX has.")


def _known_kind(kind: str) -> str:
    """The driver's name of the GPUs that `kind` is some words of, where one table alone has it.

    Of whole words, in upper or lower case: an "NVIDIA H20" is no "NVIDIA H200".
    """
    kinds = [tables.read(path).device_kind for path in sorted(tables.folder().glob("*.toml"))]
    words = f" {kind} ".lower()
    found = [known for known in kinds if words in f" {known} ".lower()]
    return found[0] if kind not in kinds and len(found) == 1 else kind
