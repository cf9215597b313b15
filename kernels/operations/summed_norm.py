"""`all_reduce_rms_norm`: what follows a row-sharded matmul in a decoder, in one kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from stretto.distributed.devices.axes import (
    AxisNames,
    canonical_axes,
    make_varying,
    varying_axes,
)
from stretto.distributed.team import Team
from stretto.kernels.collectives import summed_norm as kernel
from stretto.kernels.collectives import summed_norm_by_heap as by_heap
from stretto.kernels.operation import Axes, Call, Examples, Kernel, Operand, Operation, Sizes
from stretto.kernels.operations.collective_rules import work
from stretto.kernels.operations.perform import (
    cotangent_of_replicated,
    decide,
    run,
    typed_alike,
)
from stretto.kernels.problem import checks
from stretto.kernels.problem.epilogue import at_least_float32
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla import collectives

OP = "all_reduce_rms_norm"
SERVED = ("bfloat16", "float16", "float32")
type Operands = tuple[jax.Array, jax.Array, jax.Array]
type Results = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of the norm: `epsilon` is added to the mean square; an array if it is known at run time."""

    epsilon: Any


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
    return reference(operands, axes, options) if call is None else _perform(operands, call)


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


def rms_norm(h: jax.Array, weight: jax.Array, epsilon: float, dtype: Any) -> jax.Array:
    """`h / sqrt(mean(h ** 2) + epsilon) * weight`, row by row, in float32 at least."""
    wide = at_least_float32(h.dtype)
    h, weight = h.astype(wide), weight.astype(wide)
    scale = lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + jnp.asarray(epsilon, wide))
    return (h * scale * weight).astype(dtype)


def _added(residual: jax.Array, total: jax.Array) -> jax.Array:
    wide = at_least_float32(residual.dtype)
    return (residual.astype(wide) + total.astype(wide)).astype(residual.dtype)


def reference(operands: Operands, axes: Axes, options: Options) -> Results:
    """Through `lax.psum`."""
    x, residual, weight = operands
    h = _added(residual, collectives.all_reduce(x, axes))
    return h, rms_norm(h, weight, options.epsilon, x.dtype)


# --- The kernel's call and its derivative ---------------------------------------------------------


def _perform(operands: Operands, call: Call) -> Results:
    """The kernel's results, of operands typed as it takes them.

    x varies over the team's axes. The others do not, so that their cotangents, which all devices
    have, are not added up over them; over other axes all are typed alike.
    """
    others = frozenset().union(*map(varying_axes, operands)) - set(call.axes)
    x, residual, weight = (make_varying(one, others) for one in operands)
    typed = bool(varying_axes(make_varying(x, call.axes)))
    operands = make_varying(x, call.axes), residual, weight
    return run(operands, dataclasses.replace(call, typed=typed))


def _launch(launch: Callable[..., Results], operands: Operands, call: Call) -> Results:
    x, residual, weight = typed_alike(call.axes, operands)
    return launch(
        *(x, residual, weight, Team.along(call.axes)),
        epsilon=call.options.epsilon,
        config=call.config,
        interpret=call.interpret,
    )


def _forward(operands: Operands, call: Call) -> tuple[Results, Any]:
    x, _, weight = operands
    h, out = run(operands, call)
    return (h, out), (h, weight, jnp.zeros((), x.dtype))


def _tangent(call: Call, residuals: Any, dots: Operands) -> Results:
    """By XLA: of the sum, and of the norm."""
    h, weight, like_x = residuals
    x_dot, residual_dot, weight_dot = dots
    h_dot = _added(residual_dot, collectives.all_reduce(x_dot, call.axes))
    norm = functools.partial(rms_norm, epsilon=call.options.epsilon, dtype=like_x.dtype)
    return h_dot, jax.jvp(norm, (h, weight), (h_dot, weight_dot))[1]


def _backward(call: Call, residuals: Any, bars: Results) -> Operands:
    """Every device has the cotangents of h and of the rows; those of h are x's as well."""
    h, weight, like_x = residuals
    norm = functools.partial(rms_norm, epsilon=call.options.epsilon, dtype=like_x.dtype)
    h_bar, weight_bar = jax.vjp(norm, h, weight)[1](bars[1])
    h_bar = _added(bars[0], h_bar)
    return cotangent_of_replicated(call, h_bar.astype(like_x.dtype)), h_bar, weight_bar


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
    forward=_forward,
    backward=_backward,
    tangent=_tangent,
    work=functools.partial(work, collective="all_reduce"),
    kernels=(
        Kernel(
            Config=kernel.Config,
            run=functools.partial(_launch, kernel.all_reduce_rms_norm),
            obstacle=_obstacle,
            default=lambda problem: kernel.Config(),
            candidates=kernel.Config.candidates,
            untried=True,
        ),
        Kernel(
            Config=by_heap.Config,
            run=functools.partial(_launch, by_heap.all_reduce_rms_norm),
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
