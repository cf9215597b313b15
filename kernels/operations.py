"""The public matmuls: what they compute, what they refuse, and which implementation serves them."""

from __future__ import annotations

import dataclasses

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes, varying_axes
from stretto.kernels import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels import checks, dispatch, fused, gradients, reference
from stretto.kernels import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.collectives import all_gather
from stretto.kernels.dispatch import Choice, Problem
from stretto.kernels.gradients import Call, bound, vary_alike
from stretto.kernels.reference import Epilogue


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    epilogue: Epilogue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    keep_gathered: bool = False,
    config: all_gather_matmul_kernel.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = epilogue(all_gather(lhs) @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m_shard, k]` | `[D * m_shard, k]` | rows |
    | rhs | `[k, n_shard]` | `[k, D * n_shard]` | columns |
    | out | `[D * m_shard, n_shard]` | `[D * m_shard, D * n_shard]` | columns |

    Equals `epilogue(lax.all_gather(lhs, axis_name, tiled=True) @ rhs)` with products summed in
    float32 and rounded once, to `out_dtype`.

    Args:
      lhs, rhs: matrices of one floating-point type; the fused kernel takes bfloat16 and float16.
      axis_name: mesh axis, or tuple of axes, that lhs is gathered over.
      epilogue: elementwise function of the float32 product, for example `jax.nn.gelu`.
      out_dtype: floating-point type of the result; lhs's by default.
      keep_gathered: keep the gathered lhs for the backward pass (`(D - 1) * m_shard * k` elements
        more memory) in place of gathering it again.
      config: of the fused kernel; chosen for the shape by default.
      backend: "auto" (the fused kernel where it is faster), "pallas" (the fused kernel, or an
        error), "xla" (lax collectives), "simulator" (the fused kernel, simulated on CPU devices).

    Raises:
      ValueError: operands that do not fit each other, an unknown axis or backend, a call outside
        `shard_map`, or a backend that cannot serve the call.

    Memory: the fused kernel holds the peers' rows of lhs, `(D - 1) * m_shard * k` elements.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    checks.check_matmul_operands("all_gather_matmul", lhs, rhs)
    dtype = checks.check_out_dtype("all_gather_matmul", out_dtype, lhs.dtype)
    devices = axis_size(axes)
    problem = _problem("all_gather_matmul", lhs, rhs, dtype, devices, m=devices, n=devices)
    choice = dispatch.choose(problem, backend, all_gather_matmul_kernel, config, axes=axes)
    if choice.backend == "xla":
        return reference.all_gather_matmul(lhs, rhs, axes, epilogue=epilogue, out_dtype=dtype)
    call = _call(axes, dtype, choice, backend, fused.all_gather_matmul, epilogue, keep_gathered)
    return gradients.all_gather_matmul(*vary_alike(axes, lhs, rhs), call)


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: matmul_reduce_scatter_kernel.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = reduce_scatter(lhs @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | out | `[m / D, n]` | `[m, n]` | rows |

    Equals `lax.psum_scatter(lhs @ rhs, axis_name, tiled=True)`. The fused kernel rounds each
    peer's partial product once, to `out_dtype`, adds them to the device's own in float32, always
    in the same order, and rounds the sum; XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices of one floating-point type; the fused kernel takes bfloat16 and float16.
      axis_name: mesh axis, or tuple of axes, that the result is scattered over.
      out_dtype: floating-point type of the result; lhs's by default.
      config: of the fused kernel; chosen for the shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`, and where m is not a multiple of D.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    op = "matmul_reduce_scatter"
    checks.check_matmul_operands(op, lhs, rhs)
    devices = axis_size(axes)
    checks.check_divisible(op, "m", lhs.shape[0], devices)
    dtype = checks.check_out_dtype(op, out_dtype, lhs.dtype)
    problem = _problem(op, lhs, rhs, dtype, devices, k=devices)
    choice = dispatch.choose(problem, backend, matmul_reduce_scatter_kernel, config, axes=axes)
    if choice.backend == "xla":
        return reference.matmul_reduce_scatter(lhs, rhs, axes, out_dtype=dtype)
    call = _call(axes, dtype, choice, backend, fused.matmul_reduce_scatter)
    return gradients.matmul_reduce_scatter(*vary_alike(axes, lhs, rhs), call)


def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: matmul_all_reduce_kernel.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = all_reduce(lhs @ rhs)`, inside `jax.shard_map`; reverse-differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | out | `[m, n]` | `[m, n]` | not sharded: the same on every device |

    Equals `lax.psum(lhs @ rhs, axis_name)`. The fused kernel rounds partial products once, to
    `out_dtype`, sums them in float32, and rounds the sum; every device holds bitwise the same
    result. XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices of one floating-point type; the fused kernel takes bfloat16 and float16.
      axis_name: mesh axis, or tuple of axes, to sum over.
      out_dtype: floating-point type of the result; lhs's by default.
      config: of the fused kernel; chosen for the shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    op = "matmul_all_reduce"
    checks.check_matmul_operands(op, lhs, rhs)
    dtype = checks.check_out_dtype(op, out_dtype, lhs.dtype)
    problem = _problem(op, lhs, rhs, dtype, axis_size(axes), k=axis_size(axes))
    choice = dispatch.choose(problem, backend, matmul_all_reduce_kernel, config, axes=axes)
    if choice.backend == "xla":
        return reference.matmul_all_reduce(lhs, rhs, axes, out_dtype=dtype)
    lhs, rhs = vary_alike(axes, lhs, rhs)
    call = _call(axes, dtype, choice, backend, fused.matmul_all_reduce)
    call = dataclasses.replace(call, typed=bool(varying_axes(lhs)))
    return gradients.matmul_all_reduce(lhs, rhs, call)


def _problem(op, lhs, rhs, out_dtype, devices, *, m=1, k=1, n=1) -> Problem:
    """The whole problem of a call; `m`, `k`, `n` are how often the operands' sizes count."""
    platform, device_kind = dispatch.platform_of_mesh()
    return Problem(
        op=op,
        m=lhs.shape[0] * m,
        k=lhs.shape[1] * k,
        n=rhs.shape[1] * n,
        dtype=str(lhs.dtype),
        out_dtype=str(out_dtype),
        devices=devices,
        platform=platform,
        device_kind=device_kind,
    )


def _call(axes, out_dtype, choice: Choice, backend, fused, epilogue=None, keep_gathered=False):
    """The call as its gradient rules need it: derivatives take the backend that was asked for."""
    return Call(
        axes=axes,
        out_dtype=out_dtype,
        config=choice.config,
        interpret=choice.interpret,
        fused=fused,
        epilogue=epilogue,
        keep_gathered=keep_gathered,
        all_gather=bound(all_gather, axes, backend),
        all_gather_matmul=bound(all_gather_matmul, axes, backend),
        matmul_reduce_scatter=bound(matmul_reduce_scatter, axes, backend),
    )
