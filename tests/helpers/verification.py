"""Whether an operation's results are right, found on the devices, by one program for a shape.

Whole numbers must come out exact, rounded once; normal ones at most twice as far from a product in
float32 of full precision as what XLA makes of the same operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import subjects
from fused_cases import F32
from jax import lax
from jax.sharding import Mesh
from subjects import Sizes, Subject

# What the order leaves open in which a few normal numbers are summed in float32.
OPEN = 2e-6
# What a verification finds on each device.
FINDINGS = ("wrong", "differing", "ours_max", "xla_max", "ours_sum", "xla_sum")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One operation at one size, with options (`backend`, `config`, ...), along `axis`."""

    subject: Subject
    sizes: Sizes
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    axis: Any = "x"

    def __str__(self) -> str:
        config = self.options.get("config")
        along = "" if self.axis == "x" else f" along {self.axis}"
        return f"{self.subject.name} {'x'.join(map(str, self.sizes))}{along} {config or ''}".strip()


@dataclasses.dataclass
class Outcome:
    """What came of a verification.

    Attributes:
      label: the problem.
      flaws: what is wrong, in words; empty if all is right.
      ratios: the largest and the mean error over XLA's (1 where both are 0).
      checksums: of the results for whole and for normal numbers, device by device.
    """

    label: str
    flaws: list[str] = dataclasses.field(default_factory=list)
    ratios: tuple[float, float] = (0.0, 0.0)
    checksums: tuple[list[int], ...] = ()


def program(problem: Problem, mesh: Mesh) -> Callable:
    """A program (seed, whole numbers or normal ones) -> `FINDINGS` and checksum of every device.

    wrong: elements that are not the exact ones, rounded once.
    differing: whether a result that all devices share has other bits here than on another.
    ours_max, xla_max, ours_sum, xla_sum: the largest and all errors, of the kernel and of XLA.
    """
    subject, axis = problem.subject, problem.axis
    shapes = subject.shapes(subjects.team_size(mesh, axis), problem.sizes)

    def body(seed, whole):
        operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=whole)
        ours = subject.call(operands, axis, **problem.options)
        # Without the barrier XLA would leave out the rounding that its result has.
        xla = lax.optimization_barrier(subject.call(operands, axis, backend="xla"))
        exact = subject.exact(operands, axis)
        errors = [jnp.maximum(jnp.abs(x.astype(F32) - exact) - OPEN, 0) for x in (ours, xla)]
        bits = checksum(ours)
        differing = lax.pmax(bits, axis) != lax.pmin(bits, axis)
        findings = [
            jnp.sum(ours.astype(F32) != subjects.rounded(exact, ours.dtype).astype(F32)),
            differing & subject.replicated,
            *(e.max() for e in errors),
            *(e.sum() for e in errors),
        ]
        return jnp.stack([f.astype(F32) for f in findings]), bits

    return subjects.on_mesh(body, mesh)


def checksum(x: jax.Array) -> jax.Array:
    """A number that changes with any bit of `x`, and with the order of its elements."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
    places = lax.iota(jnp.uint32, words.size) * jnp.uint32(2654435761) + jnp.uint32(1)
    return jnp.sum(words.astype(jnp.uint32) * places, dtype=jnp.uint32)


def judge(label: str, whole: np.ndarray, normal: np.ndarray) -> Outcome:
    """What `FINDINGS` of every device on whole and on normal numbers say of a kernel."""
    outcome = Outcome(label)
    exact = dict(zip(FINDINGS, whole.T, strict=True))
    found = dict(zip(FINDINGS, normal.T, strict=True))
    if exact["wrong"].any():
        outcome.flaws.append(f"wrong elements on whole numbers, by device: {exact['wrong']}")
    if exact["differing"].any() or found["differing"].any():
        outcome.flaws.append("devices hold different bits")
    ratios = []
    for kind in ("max", "sum"):
        ours, xla = found[f"ours_{kind}"].max(), found[f"xla_{kind}"].max()
        if not (ours <= 2 * xla):  # Also where one is not a number.
            outcome.flaws.append(f"{kind} error {ours:.4g}, XLA's {xla:.4g}")
        ratios.append(float(ours / xla) if xla else 1.0)
    outcome.ratios = (ratios[0], ratios[1])
    return outcome


def verify(mesh: Mesh, problems: Iterable[Problem]) -> list[Outcome]:
    """The outcome of each problem. A failure to compile or run is a flaw, too."""
    arguments = compiling.scalar(0), compiling.scalar(True)
    programs = ((str(p), program(p, mesh), arguments) for p in problems)
    outcomes = []
    for number, (label, compiled) in enumerate(compiling.side_by_side(programs)):
        try:
            outcomes.append(_run(label, compiled, number))
        except jax.errors.JaxRuntimeError as error:
            outcomes.append(Outcome(label, [compiling.first_line(error)]))
    return outcomes


def _run(label: str, compiled: Any, number: int) -> Outcome:
    if isinstance(compiled, Exception):
        return Outcome(label, [compiling.first_line(compiled)])
    (whole, bits), (normal, normal_bits) = (
        compiling.run(compiled, 2 * number + flag, bool(flag)) for flag in (1, 0)
    )
    outcome = judge(label, whole, normal)
    outcome.checksums = (bits.tolist(), normal_bits.tolist())
    return outcome
