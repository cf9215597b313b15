"""The record of an operation on one device, with operands of several shapes and types.

Rows of lhs lie group by group, and each group is multiplied by a matrix of its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from stretto.kernels.operation import Examples, Kernel, Operand, Operation
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tile_m: int = 128

    def check(self, problem):
        if self.tile_m % 8:
            raise ValueError(f"tile_m={self.tile_m} must be a multiple of 8.")


def grouped(lhs, rhs, group_sizes, *, backend="auto", config=None):
    """`[m, k]`, `[g, k, n]`, `[g]` -> `[m, n]`."""
    (m, k), (g, _, n) = lhs.shape, rhs.shape
    types = Types(lhs=str(lhs.dtype), rhs=str(rhs.dtype), out=str(lhs.dtype))
    operands, sizes = (lhs, rhs, group_sizes), dict(m=m, k=k, n=n, g=g)
    call = decide(GROUPED, sizes, types, (), None, backend=backend, config=config)
    return reference(operands, (), None) if call is None else perform(operands, call)


def reference(operands, axes, options):
    return lax.ragged_dot(*operands)


def example_operands(sizes, devices):
    m, k, n, g = (sizes[name] for name in "mkng")

    def group_sizes(key):
        return jnp.bincount(jax.random.randint(key, (m,), 0, g), length=g)

    return (
        Operand(shape=(m, k)),
        Operand(shape=(g, k, n)),
        Operand(shape=(g,), dtype="int32", draw=group_sizes),
    )


def work(problem):
    m, k, n, g = (problem.sizes[name] for name in "mkng")
    return Work(product=(m, k, n), matrices=g)


GROUPED = Operation(
    name="grouped",
    public=grouped,
    sizes=("m", "k", "n", "g"),
    reference=reference,
    forward=lambda operands, call: (call.kernel.run(operands, call), operands),
    backward=lambda call, residuals, bars: residuals,
    work=work,
    kernels=(
        Kernel(
            Config=Config,
            run=lambda operands, call: reference(operands, (), None),
            obstacle=lambda problem: None,
            default=lambda problem: Config(),
            candidates=lambda problem: iter([Config(), Config(tile_m=64)]),
        ),
    ),
    examples=Examples(
        sets=("tiny", "experts"),
        shapes=lambda name, devices: [dict(m=64, k=32, n=16, g=4)],
        operands=example_operands,
    ),
    communicates=False,
)
