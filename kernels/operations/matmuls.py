"""The public matmuls: what they compute, what they refuse, and which implementation serves them.

Over axes that span nodes, such as `("node", "gpu")`, XLA moves between nodes and a fused kernel
serves within each (`hierarchical_matmuls`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes, varying_axes
from stretto.kernels.choice import dispatch
from stretto.kernels.choice.dispatch import Choice, Problem
from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.fused import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.fused import padded as fused
from stretto.kernels.nodes import hierarchical_matmuls, nodes
from stretto.kernels.operations import gather_axes, gradients
from stretto.kernels.operations.collectives import all_gather, reduce_scatter
from stretto.kernels.operations.gather_axes import GatherAxis, Operands
from stretto.kernels.operations.gradients import Call, Matrices, bound, vary_alike
from stretto.kernels.problem import checks, epilogues, reference
from stretto.kernels.problem.reference import Epilogue


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    epilogue: Epilogue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    gather_axis: GatherAxis = "m",
    return_gathered: bool = False,
    keep_gathered: bool = False,
    config: all_gather_matmul_kernel.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> Any:
    """`out = epilogue(all_gather(lhs) @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    Or `epilogue(lhs @ all_gather(rhs))`. Of the problem `M x K x N`, `gather_axis` names the
    dimension along which the gathered operand lies in shards. Per device, in a team of D:

    | `gather_axis` | lhs | rhs | rhs, transposed | out |
    |---|---|---|---|---|
    | "m" | **`[m / D, k]`** | `[k, n]` | `[n, k]` | `[m, n]` |
    | "k" | **`[m, k / D]`** | `[k, n]` | `[n, k]` | `[m, n]` |
    | "n" | `[m, k]` | **`[k, n / D]`** | **`[n / D, k]`** | `[m, n]` |

    What is not gathered is the device's own: of "m" and "k" columns of rhs and out, with out
    `[m, D * n]` as a whole; of "n" rows of lhs and out, as in fully sharded data parallelism.

    Equals `epilogue(lax.all_gather(lhs, axis_name, tiled=True) @ rhs)` for "m", and for the others
    the same with `axis=1`, of lhs for "k" and of rhs for "n"; with products summed in float32 and
    rounded once, to `out_dtype`.

    Args:
      lhs: matrix; the fused kernel takes bfloat16 and float16.
      rhs: matrix of lhs's type. Or several, each with an `n` of its own, in a tuple: lhs is
        gathered once for all (queries, keys and values; gate and up). Not for "n".
      axis_name: mesh axis, or tuple of axes, to gather over.
      epilogue: elementwise function of the float32 product, for example `jax.nn.gelu`; of each.
        It is applied to pieces of the product, so what looks at several elements is refused.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k]`. No transposed copy is made.
      gather_axis: "m", "k" or "n", as above. For "n" XLA transposes the result, and the shard of
        rhs if that is not given transposed. Only "m" has a fused version over several nodes.
      return_gathered: return `(out, gathered)`, with the gathered operand, whole.
      keep_gathered: keep the gathered operand for the backward pass (D - 1 shards more memory) in
        place of gathering it again. Policies of `jax.checkpoint` know it by the name "gathered".
      config: of the fused kernel, or `nodes.Config` for a team that spans nodes; chosen for the
        shape by default.
      backend: "auto" (the fused kernel where it is faster), "pallas" (the fused kernel, or an
        error), "xla" (lax collectives), "simulator" (the fused kernel, simulated on CPU devices).

    Returns:
      out, or a tuple of them where rhs is one; with the gathered operand after it, if asked for.

    Raises:
      ValueError: operands that do not fit each other, an unknown axis or backend, a call outside
        `shard_map`, an epilogue that is not elementwise, or a backend that cannot serve the call.

    Memory: the fused kernel holds the peers' shards of what is gathered, D - 1 of them.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    operands = Operands.checked(gather_axis, lhs, rhs, rhs_transposed, axis_size(axes))
    dtype = checks.check_out_dtype(gather_axes.OP, out_dtype, lhs.dtype)
    if epilogue is not None:
        epilogues.check_elementwise(gather_axes.OP, epilogue)
    problem = _problem(operands.op, lhs.dtype, dtype, operands.devices, *operands.sizes())
    choice = dispatch.choose(problem, backend, operands.kernel, config, axes=axes)
    if choice.backend == "xla":
        outs, gathered = reference.all_gather_matmul(
            lhs,
            operands.sides,
            axes,
            epilogue=epilogue,
            out_dtype=dtype,
            rhs_transposed=rhs_transposed,
            gather_axis=gather_axis,
        )
    else:
        moved, sides, transposed = operands.for_kernel()
        call = dataclasses.replace(
            _call(axes, dtype, choice, backend, config, transposed),
            axis=1 if gather_axis == "k" else 0,
            gathered=return_gathered,
            epilogue=epilogue,
            keep_gathered=keep_gathered,
        )
        alike = vary_alike(axes, moved, *sides)
        results: Any = gradients.all_gather_matmul(alike[0], tuple(alike[1:]), call)
        outs, gathered = operands.results(*results)
    out = outs if isinstance(rhs, tuple | list) else outs[0]
    return (out, gathered) if return_gathered else out


def matmul_reduce_scatter(
    lhs: jax.Array | Sequence[jax.Array],
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    config: matmul_reduce_scatter_kernel.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = reduce_scatter(lhs @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | rhs, transposed | `[n, k_shard]` | `[n, D * k_shard]` | columns |
    | out | `[m / D, n]` | `[m, n]` | rows |

    Equals `lax.psum_scatter(lhs @ rhs, axis_name, tiled=True)`. The fused kernel rounds each
    peer's partial product once, to `out_dtype`, adds them to the device's own in float32, always
    in the same order, and rounds the sum; XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices of one floating-point type; the fused kernel takes bfloat16 and float16.
        Or tuples of as many, each pair with a `k_shard` of its own: their products are added up,
        as if they were joined along k, and no copy is made.
      axis_name: mesh axis, or tuple of axes, that the result is scattered over.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k_shard]`. No transposed copy is made.
      config: of the fused kernel, or `nodes.Config` for a team that spans nodes; chosen for the
        shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`, and where m is not a multiple of D.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements.
    Synchronisation: every device of the team must make the call.
    """
    op = "matmul_reduce_scatter"
    lhs, rhs = _pairs(op, lhs, rhs, rhs_transposed)
    axes = canonical_axes(axis_name)
    checks.check_divisible(op, "m", lhs[0].shape[0], axis_size(axes))
    dtype = checks.check_out_dtype(op, out_dtype, lhs[0].dtype)
    problem = _problem_of_pairs(op, lhs, rhs, dtype, axis_size(axes), rhs_transposed)
    choice = dispatch.choose(problem, backend, matmul_reduce_scatter_kernel, config, axes=axes)
    if choice.backend == "xla":
        return reference.matmul_reduce_scatter(
            lhs, rhs, axes, out_dtype=dtype, rhs_transposed=rhs_transposed
        )
    call = _call(axes, dtype, choice, backend, config, rhs_transposed)
    return gradients.matmul_reduce_scatter(*_vary_alike(axes, lhs, rhs), call)


def matmul_all_reduce(
    lhs: jax.Array | Sequence[jax.Array],
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    config: matmul_all_reduce_kernel.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = all_reduce(lhs @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | rhs, transposed | `[n, k_shard]` | `[n, D * k_shard]` | columns |
    | out | `[m, n]` | `[m, n]` | not sharded: the same on every device |

    Equals `lax.psum(lhs @ rhs, axis_name)`. The fused kernel rounds partial products once, to
    `out_dtype`, sums them in float32, and rounds the sum; every device holds bitwise the same
    result. XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices, or tuples of matrices, as for `matmul_reduce_scatter`.
      axis_name: mesh axis, or tuple of axes, to sum over.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k_shard]`. No transposed copy is made.
      config: of the fused kernel, or `nodes.Config` for a team that spans nodes; chosen for the
        shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements.
    Synchronisation: every device of the team must make the call.
    """
    op = "matmul_all_reduce"
    lhs, rhs = _pairs(op, lhs, rhs, rhs_transposed)
    axes = canonical_axes(axis_name)
    dtype = checks.check_out_dtype(op, out_dtype, lhs[0].dtype)
    problem = _problem_of_pairs(op, lhs, rhs, dtype, axis_size(axes), rhs_transposed)
    choice = dispatch.choose(problem, backend, matmul_all_reduce_kernel, config, axes=axes)
    if choice.backend == "xla":
        return reference.matmul_all_reduce(
            lhs, rhs, axes, out_dtype=dtype, rhs_transposed=rhs_transposed
        )
    lhs, rhs = _vary_alike(axes, lhs, rhs)
    call = _call(axes, dtype, choice, backend, config, rhs_transposed)
    call = dataclasses.replace(call, typed=bool(varying_axes(lhs[0])))
    return gradients.matmul_all_reduce(lhs, rhs, call)


def _pairs(op, lhs, rhs, rhs_transposed) -> tuple[Matrices, Matrices]:
    """The operands as tuples of equal length, checked."""
    lhs, rhs = checks.as_matrices(op, "lhs", lhs), checks.as_matrices(op, "rhs", rhs)
    checks.check_pairs(op, lhs, rhs, rhs_transposed=rhs_transposed)
    return lhs, rhs


def _vary_alike(axes, lhs: Matrices, rhs: Matrices) -> tuple[Matrices, Matrices]:
    alike = tuple(vary_alike(axes, *lhs, *rhs))
    return alike[: len(lhs)], alike[len(lhs) :]


def _problem_of_pairs(op, lhs, rhs, out_dtype, devices, rhs_transposed) -> Problem:
    n = rhs[0].shape[0 if rhs_transposed else 1]
    k = devices * sum(x.shape[1] for x in lhs)
    return _problem(op, lhs[0].dtype, out_dtype, devices, lhs[0].shape[0], k, n)


def _problem(op, dtype, out_dtype, devices, m, k, n) -> Problem:
    """The whole problem of a call."""
    platform, device_kind = dispatch.platform_of_mesh()
    return Problem(
        op=op,
        m=m,
        k=k,
        n=n,
        dtype=str(dtype),
        out_dtype=str(out_dtype),
        devices=devices,
        platform=platform,
        device_kind=device_kind,
    )


def _call(axes, out_dtype, choice: Choice, backend, config, rhs_transposed):
    """The call as its gradient rules need it: derivatives take the backend that was asked for."""
    kernels = hierarchical_matmuls if choice.split else fused
    return Call(
        axes=axes,
        out_dtype=out_dtype,
        config=choice.config,
        interpret=choice.interpret,
        fused=getattr(kernels, choice.problem.op),
        rhs_transposed=rhs_transposed,
        all_gather=bound(all_gather, axes, backend),
        all_gather_matmul=bound(all_gather_matmul, axes, backend),
        matmul_reduce_scatter=bound(matmul_reduce_scatter, axes, backend),
        reduce_scatter=bound(reduce_scatter, axes, backend),
        split=choice.split,
        pieces=config.pieces if isinstance(config, nodes.Config) else None,
    )
