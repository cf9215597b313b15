"""`all_reduce_rms_norm`: what follows a row-sharded matmul in a decoder, in one kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from stretto.distributed.devices.axes import AxisNames, canonical_axes, varying_axes
from stretto.kernels.collectives import summed_norm as kernel
from stretto.kernels.collectives import summed_norm_by_heap as by_heap
from stretto.kernels.operation import Axes, Examples, Kernel, Operand, Operation, Sizes
from stretto.kernels.operations.collective_rules import work
from stretto.kernels.operations.perform import decide
from stretto.kernels.operations.summed_norm_rules import (
    Operands,
    Options,
    Results,
    backward,
    forward,
    launch,
    perform,
    reference,
    tangent,
)
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.promotion import by_default_rules

OP = "all_reduce_rms_norm"
SERVED = ("bfloat16", "float16", "float32")


@takes_numpy_arrays
@by_default_rules
def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    axis_name: AxisNames,
    *,
    epsilon: float | jax.Array = 1e-6,
    config: kernel.Config | by_heap.Config | None = None,
    backend: str = "auto",
) -> Results:
    """`h = residual + sum of x` and `h / rms(h) * weight`, inside `jax.shard_map`; differentiable.

    | operand, result | shape | on each device | type |
    |---|---|---|---|
    | x | `[m, n]` | its terms of the sum | floating-point |
    | residual | `[m, n]` | the same | floating-point |
    | weight | `[n]` | the same | floating-point |
    | h | `[m, n]` | the same | residual's |
    | normalised rows | `[m, n]` | the same | x's |

    Equals `h = residual + lax.psum(x, axis_name)` and `h * rsqrt(mean(h ** 2) + epsilon) * weight`,
    row by row, computed in float32. The kernel adds in float32 in the order of the devices and
    rounds h once; the rows are normalised as rounded. Root mean square norm: B. Zhang and R.
    Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
      x, residual, weight: as above. The kernel takes bfloat16, float16 and float32, and rows of a
        multiple of 256 elements.
      axis_name: mesh axis, or tuple of axes, to add over.
      epsilon: added to the mean square; not negative. One that is traced is XLA's.
      config: of the kernel; chosen for the size by default.
      backend: "auto" (the kernel where it is known to be faster), "pallas" (the kernel, or an
        error), "xla" (lax), "simulator" (the kernel, simulated on CPU devices).

    Raises:
      ValueError: operands that do not fit each other or are no floating-point numbers, a negative
        epsilon, an unknown mesh axis or backend, or one that cannot serve the call.

    Synchronisation: every device of the team must make the call. Over several nodes it is XLA's.
    """
    epsilon = _check(x, residual, weight, epsilon)
    axes, options = canonical_axes(axis_name), Options(epsilon=epsilon)
    operands = x, residual, weight
    types = Types(lhs=str(x.dtype), rhs=str(residual.dtype), out=str(x.dtype))
    sizes = dict(m=x.shape[0], n=x.shape[1])
    obstacle = _obstacle_of_operands(operands, axes)
    if isinstance(epsilon, Tracer):
        obstacle = "epsilon is known when the program runs, and the kernel needs a number."
    call = decide(
        ALL_REDUCE_RMS_NORM,
        *(sizes, types, axes, options),
        backend=backend,
        config=config,
        obstacle=obstacle,
    )
    return reference(operands, axes, options) if call is None else perform(operands, call)


def _check(x: Any, residual: Any, weight: Any, epsilon: Any) -> Any:
    """`epsilon`, as a number unless it is traced; raises ValueError for what does not fit."""
    for name, array in (("x", x), ("residual", residual), ("weight", weight)):
        checks.check_array(OP, name, array)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{OP}: {name} is {array.dtype}; it must be floating-point. Cast it.")
    if x.ndim != 2:
        raise ValueError(f"{OP}: x has shape {x.shape}; it must be [rows, n]. Reshape it.")
    for name, array, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[1:])):
        if array.shape != shape:
            raise ValueError(
                f"{OP}: {name} has shape {array.shape}; with x {x.shape} it is {shape}."
            )
    if isinstance(epsilon, Tracer) and epsilon.shape == ():
        return epsilon
    try:
        number = float(epsilon)
    except (TypeError, ValueError):
        raise ValueError(f"{OP}: epsilon={epsilon!r:.60} must be a number.") from None
    if not number >= 0:
        raise ValueError(f"{OP}: epsilon={epsilon} must not be negative.")
    return number


def _obstacle_of_operands(operands: Operands, axes: Axes) -> str | None:
    """Why the kernel cannot serve this call, for any size: each device stores for all."""
    _, residual, weight = operands
    for name, array in (("residual", residual), ("weight", weight)):
        if varying_axes(array) & set(axes):
            return (
                f"{name} varies over {axes}, and the kernel takes it for the same on all devices."
            )
    if str(weight.dtype) not in SERVED:
        return f"the kernel takes weights of {', '.join(SERVED)}, not {weight.dtype}."
    return None


# --- The record -----------------------------------------------------------------------------------


def _obstacle(problem: Problem) -> str | None:
    m, n = problem.sizes["m"], problem.sizes["n"]
    residual = problem.types.rhs or problem.types.lhs
    if m == 0 or n == 0:
        return "the array is empty."
    for name, dtype in (("x", problem.types.lhs), ("residual", residual)):
        if dtype not in SERVED:
            return f"the kernel takes {', '.join(SERVED)}, and {name} is {dtype}."
    if n % kernel.COLUMNS:
        return f"the kernel takes rows of a multiple of {kernel.COLUMNS} elements, not n={n}."
    itemsizes = problem.types.itemsize, jnp.dtype(residual).itemsize
    too_wide = kernel.Rooms.of(problem.devices, n, itemsizes, stages=1) is None
    if too_wide or n > kernel.MOST_PIECES * kernel.COLUMNS:
        return f"rows of n={n} of {problem.devices} devices do not fit into shared memory."
    return None


def _obstacle_by_heap(problem: Problem) -> str | None:
    further = by_heap.obstacle(problem.devices, problem.sizes["n"], problem.types.lhs)
    return _obstacle(problem) or further


def shapes(name: str, devices: int) -> Sequence[Sizes]:
    """Rows of decoding, of prompts, and of models' widths."""
    del devices
    found = {
        "tiny": [(8, 256), (5, 768)],
        "goals": [(6, 6144), (138, 6144), (1024, 6144), (4096, 6144)],
        "decode": [(rows, 8192) for rows in (1, 8, 32, 64, 128, 256, 512, 2048)],
        "awkward-few": [(1, 256), (63, 2816), (65, 5120), (1000, 7168)],
    }
    return [dict(m=m, n=n) for m, n in found.get(name, [])]


def _replicated(shape: tuple[int, ...], add: float) -> Operand:
    """An operand that all devices hold the same of: it does not depend on their keys."""

    def draw(key: jax.Array) -> jax.Array:
        del key
        return add + jax.random.normal(jax.random.key(math.prod(shape)), shape)

    return Operand(shape=shape, draw=draw)


def example_operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """x, residual and weight of one device."""
    del devices
    shape = sizes["m"], sizes["n"]
    return Operand(shape=shape), _replicated(shape, 0.0), _replicated(shape[1:], 1.0)


ALL_REDUCE_RMS_NORM = Operation(
    name=OP,
    public=all_reduce_rms_norm,
    sizes=("m", "n"),
    reference=reference,
    forward=forward,
    backward=backward,
    tangent=tangent,
    work=functools.partial(work, collective="all_reduce"),
    kernels=(
        Kernel(
            Config=kernel.Config,
            run=functools.partial(launch, kernel.all_reduce_rms_norm),
            obstacle=_obstacle,
            default=lambda problem: kernel.Config(),
            candidates=kernel.Config.candidates,
            untried=True,
        ),
        Kernel(
            Config=by_heap.Config,
            run=functools.partial(launch, by_heap.all_reduce_rms_norm),
            obstacle=_obstacle_by_heap,
            default=lambda problem: by_heap.Config(),
            candidates=by_heap.Config.candidates,
            untried=True,
            recorded_to=by_heap.RECORDED_TO,
            unrecorded_to=by_heap.UNRECORDED_TO,
        ),
    ),
    examples=Examples(
        sets=("tiny", "goals", "decode", "awkward-few"), shapes=shapes, operands=example_operands
    ),
)
