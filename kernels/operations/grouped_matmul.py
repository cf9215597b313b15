"""`grouped_matmul`: a matmul of groups of rows, each with its own right-hand side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.fused import grouped_matmul as kernel
from stretto.kernels.fused.group_tables import bounds, cut_off
from stretto.kernels.fused.grouped_contraction import contracted
from stretto.kernels.operation import Axes, Call, Examples, Operand, Operation, Sizes
from stretto.kernels.operations import scaled_groups, scaled_records
from stretto.kernels.operations.perform import decide, perform, run
from stretto.kernels.operations.scaled import Records
from stretto.kernels.problem import checks, scales
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.options import GroupedOptions, MatmulOptions, types_of
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.work import Work
from stretto.kernels.xla import ragged

OP = "grouped_matmul"
type Operands = tuple[jax.Array, jax.Array, jax.Array]


@takes_numpy_arrays
@by_default_rules
def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    config: kernel.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out[r] = lhs[r] @ rhs[group of r]`, on one device; differentiable.

    | operand | shape | type |
    |---|---|---|
    | lhs | `[m, k]`, rows group by group | floating-point |
    | rhs | `[g, k, n]`, or transposed `[g, n, k]` | lhs's |
    | group_sizes | `[g]`, rows of each group | int32 |
    | out | `[m, n]` | `out_dtype` |

    Equals `lax.ragged_dot(lhs, rhs, group_sizes)`, with products summed in float32 and rounded
    once. The sizes are read at run time, and may be zero. Rows beyond their sum belong to no group:
    they are zero, and so are their derivatives. Sizes that sum to more than m are cut off at m, and
    negative ones count as zero.

    Args:
      lhs: matrix; the kernel takes bfloat16 and float16.
      rhs: a matrix for each group.
      group_sizes: rows of each group, in their order.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[g, n, k]`. No transposed copy is made.
      lhs_scale, rhs_scale: scales of operands in 8 bits (`float8_e4m3fn`, `float8_e5m2`, also
        mixed), float32: of lhs `[]`, `[m, 1]` or `[m, k / 128]`; of rhs `[]`, `[g, 1, 1]`,
        `[g, 1, n]` or `[g, k / 128, n / 128]`, transposed as rhs is. Without one of both, it is 1.
        `stretto.quantise` makes them. The result is bfloat16 by default; the kernel takes rhs
        transposed, `[g, n, k]`; there is no derivative.
      config: of the kernel; chosen for the shape by default.
      backend: "auto" (the kernel where it is faster), "pallas" (the kernel, or an error), "xla"
        (`lax.ragged_dot`), "simulator" (the kernel, simulated on a CPU device).

    Raises:
      ValueError: operands that do not fit each other, an unknown backend, or one that cannot serve
        the call.

    Memory: the backward pass copies up to `tile_k` rows a group of lhs and of the cotangent.
    """
    has_scales = lhs_scale is not None or rhs_scale is not None
    checks.check_grouped_operands(
        OP, lhs, rhs, group_sizes, rhs_transposed=rhs_transposed, scaled=has_scales
    )
    default = jnp.bfloat16 if has_scales else lhs.dtype
    options = GroupedOptions(
        out_dtype=checks.check_out_dtype(OP, out_dtype, default), rhs_transposed=rhs_transposed
    )
    operands = lhs, rhs, cut_off(group_sizes, lhs.shape[0])
    if has_scales:
        return scaled_groups.grouped(
            SCALED,
            operands,
            sizes_of(lhs, rhs, options),
            (lhs_scale, rhs_scale),
            options,
            config=config,
            backend=backend,
        )
    return _performed(operands, options, config, backend)


def product_of_groups(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    rhs_transposed: bool,
    zeros: bool,
    backend: str,
) -> jax.Array:
    """`grouped_matmul` of operands that fit; without `zeros` rows of no group are undefined."""
    options = GroupedOptions(out_dtype=lhs.dtype, rhs_transposed=rhs_transposed, zeros=zeros)
    return _performed((lhs, rhs, cut_off(group_sizes, lhs.shape[0])), options, None, backend)


def sizes_of(lhs: jax.Array, rhs: jax.Array, options: MatmulOptions) -> Sizes:
    """The sizes of a problem, by name."""
    n = rhs.shape[1 if options.rhs_transposed else 2]
    return dict(m=lhs.shape[0], k=lhs.shape[1], n=n, g=rhs.shape[0])


def _performed(
    operands: Operands, options: GroupedOptions, config: kernel.Config | None, backend: str
) -> jax.Array:
    lhs, rhs, _ = operands
    sizes, types = sizes_of(lhs, rhs, options), types_of(lhs, rhs, options)
    call = decide(GROUPED_MATMUL, sizes, types, (), options, backend=backend, config=config)
    return reference(operands, (), options) if call is None else perform(operands, call)


def reference(operands: Operands, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`lax.ragged_dot`, with rows that belong to no group zero."""
    del axes
    lhs, rhs, sizes = operands
    rhs = rhs.swapaxes(1, 2) if options.rhs_transposed else rhs
    return ragged.product(lhs, rhs, _cut_sizes(sizes, lhs.shape[0])).astype(options.out_dtype)


def _forward(operands: Operands, call: Call) -> tuple[jax.Array, Operands]:
    return run(operands, call), operands


def _backward(call: Call, residuals: Operands, bar: jax.Array) -> tuple[Any, Any, None]:
    """lhs_bar = bar @ rhs^T, group by group; rhs_bar = lhs^T @ bar, over each group's rows."""
    lhs, rhs, sizes = residuals
    bar = bar.astype(lhs.dtype)
    transposed = call.options.rhs_transposed
    lhs_bar = grouped_matmul(bar, rhs, sizes, rhs_transposed=not transposed, backend=call.backend)
    x, y = (bar, lhs) if transposed else (lhs, bar)
    return lhs_bar, _contracted(x, y, sizes, call), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _contracted(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, call: Call) -> jax.Array:
    return contracted(lhs, rhs, sizes, tiles=call.config.tiles, interpret=call.interpret)


@_contracted.defjvp
@by_default_rules
def _contracted_jvp(call: Call, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Second derivatives: by XLA."""
    lhs, rhs, sizes = primals
    dots = tangents[:2]
    cut = _cut_sizes(sizes, lhs.shape[0])
    _, out_dot = jax.jvp(lambda x, y: ragged.contraction(x, y, cut), (lhs, rhs), dots)
    return _contracted(lhs, rhs, sizes, call), out_dot.astype(lhs.dtype)


def _cut_sizes(sizes: jax.Array, m: int) -> jax.Array:
    """The sizes of groups within the `m` rows."""
    return jnp.diff(bounds(sizes, m)[1], prepend=0)


def work(problem: Problem) -> Work:
    """All rows, times the matrix of their group."""
    m, k, n, g = (problem.sizes[name] for name in "mkng")
    return Work(product=(m, k, n), matrices=g)


def shapes(name: str, devices: int) -> Sequence[Sizes]:
    """The products of layers of a mixture of experts, 8192 tokens a device of two."""
    del devices
    sizes = {
        "tiny": [(256, 128, 128, 4)],
        "goals": [
            (65536, 2048, 1536, 32),
            (65536, 768, 2048, 32),
            (16384, 4096, 28672, 2),
            (16384, 14336, 4096, 2),
        ],
        "awkward-few": [(1000, 72, 136, 7), (65, 4104, 200, 3)],
    }.get(name, [])
    return [dict(zip("mkng", size, strict=True)) for size in sizes]


def example_operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """lhs, rhs and the sizes of groups."""
    del devices
    m, k, n, g = (sizes[name] for name in "mkng")
    return (
        Operand(shape=(m, k)),
        Operand(shape=(g, k, n)),
        Operand(shape=(g,), dtype="int32", draw=functools.partial(_drawn_sizes, m=m, groups=g)),
    )


def _drawn_sizes(key: jax.Array, *, m: int, groups: int) -> jax.Array:
    """Sizes that sum to m: equal groups, of which neighbours exchange some rows."""
    even = jnp.full(groups, m // groups, jnp.int32).at[0].add(m % groups)
    moved = jax.random.randint(key, (groups // 2,), 0, m // groups // 8 + 1)
    return even.at[0 : 2 * (groups // 2) : 2].add(moved).at[1::2].add(-moved)


GROUPED_MATMUL = Operation(
    name=OP,
    public=grouped_matmul,
    sizes=("m", "k", "n", "g"),
    reference=reference,
    forward=_forward,
    backward=_backward,
    work=work,
    kernels=(kernel.KERNEL,),
    examples=Examples(
        sets=("tiny", "goals", "awkward-few"), shapes=shapes, operands=example_operands
    ),
    communicates=False,
)

SCALED: Records = {
    kind: scaled_records.record(kind, grouped_matmul, GROUPED_MATMUL)
    for kind in scales.GRANULARITIES
}
