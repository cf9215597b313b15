"""The public matmuls over a team: what they compute and what they refuse.

Each call is served by one function of two: `plain_gather` and `plain_sums` without scales,
`scaled_gather` and `scaled_sums` with them. Their records (`matmul_records`, `scaled_records`) are
at the end. Over axes that span nodes, such as `("node", "gpu")`, XLA moves between nodes and a
fused kernel serves within each (`nodes.hierarchical_matmuls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stretto.distributed.devices.axes import AxisNames, canonical_axes
from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.fused import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.operation import Operation
from stretto.kernels.operations import (
    epilogues,
    matmul_records,
    plain_gather,
    plain_sums,
    scaled,
    scaled_gather,
    scaled_records,
    scaled_sums,
)
from stretto.kernels.operations.asked import Asked
from stretto.kernels.operations.gathered import GatherAxis
from stretto.kernels.problem import checks, node_config, scales
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules


@takes_numpy_arrays
@by_default_rules
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    epilogue: epilogues.Like = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    gather_axis: GatherAxis = "m",
    axis: int | None = None,
    return_gathered: bool = False,
    keep_gathered: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | Sequence[jax.Array] | None = None,
    config: all_gather_matmul_kernel.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> Any:
    """`out = epilogue(all_gather(lhs) @ rhs)`, inside `jax.shard_map`; differentiable.

    Or `epilogue(lhs @ all_gather(rhs))`. Of the problem `M x K x N`, `gather_axis` names the
    dimension along which the gathered operand is sharded. Per device, in a team of D:

    | `gather_axis` | lhs | rhs | rhs, transposed | out |
    |---|---|---|---|---|
    | "m" | **`[m / D, k]`** | `[k, n]` | `[n, k]` | `[m, n]` |
    | "k" | **`[m, k / D]`** | `[k, n]` | `[n, k]` | `[m, n]` |
    | "n" | `[m, k]` | **`[k, n / D]`** | **`[n / D, k]`** | `[m, n]` |

    The other operand is the device's own. For "m" and "k" each device has some columns of rhs and
    out, and out is `[m, D * n]` as a whole. For "n" each device has some rows of lhs and out, as in
    fully sharded data parallelism.

    Equals `epilogue(lax.all_gather(lhs, axis_name, tiled=True) @ rhs)` for "m". For "k" lhs is
    gathered with `axis=1`, for "n" rhs is. Products are summed in float32 and rounded once, to
    `out_dtype`.

    With more dimensions before its rows, lhs `[..., k]` is a batch, gathered along `axis`: equal to
    `lax.all_gather(lhs, axis_name, axis=axis, tiled=True) @ rhs`, of `[b, s / D, k]` with `axis=1`
    `[b, s, n]`. If `axis` is the first dimension (but for some of size 1), nothing is copied.
    The kernel stores the result in order, too, where the rows of a device from `axis` on, `s / D`,
    are a multiple of 256. Otherwise XLA copies it into order, and `stretto.explain` reports it.

    Args:
      lhs: matrix, or a batch of them; the fused kernel takes bfloat16 and float16.
      rhs: matrix of lhs's type. Or several, each with an `n` of its own, in a tuple: lhs is
        gathered once for all (queries, keys and values; gate and up). Not for "n".
      axis_name: mesh axis, or tuple of axes, to gather over.
      epilogue: elementwise function of the float32 product, or of each product, for example
        `jax.nn.gelu`. It is applied to pieces, so a function of several elements is an error. Or a
        name ("gelu"), `(function, *arrays)`, or a `stretto.Epilogue` (`stretto.epilogues` has the
        common ones). Its arrays broadcast to the result of one device. A gated epilogue such as
        "swiglu" needs a pair (gate, up) as rhs, and out is one matrix.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k]`. No transposed copy is made.
      gather_axis: "m", "k" or "n", as above. For "n" XLA transposes the result, and the shard of
        rhs if that is not given transposed. Only "m" has a fused version over several nodes.
      axis: dimension of lhs that is gathered, for "m"; may be negative. The first by default.
      return_gathered: return `(out, gathered)`, with the gathered operand, whole.
      keep_gathered: keep the gathered operand for the backward pass (D - 1 shards more memory) in
        place of gathering it again. Policies of `jax.checkpoint` know it by the name "gathered".
      lhs_scale, rhs_scale: scales in float32 of operands in 8 bits (`float8_e4m3fn`,
        `float8_e5m2`, also mixed), made by `stretto.quantise`. A device's lhs `[..., k]` takes
        `[]`, `[..., 1]` or `[..., k / 128]`; its rhs `[]`, `[1, n]` or `[k / 128, n / 128]`,
        transposed as rhs is; several rhs take a tuple. Or both in float8_e8m0fnu, `[..., k / 32]`
        and `[n, k / 32]` of a transposed rhs, whose kernel is for Blackwell. Scales are gathered
        with their operand. A missing one is 1. The result is bfloat16 by default. The kernel needs
        a transposed rhs, `[n, k]`, and gather_axis "m" or, without blocks, "n". There is no
        derivative (`stretto.fp8` has one).
      config: of the fused kernel, or `node_config.Config` for several nodes; chosen for the
        shape by default.
      backend: "auto" (the fused kernel where it is faster), "pallas" (the fused kernel, or an
        error), "xla" (lax collectives), "simulator" (the fused kernel, simulated on CPU devices).

    Returns:
      out, or a tuple if rhs is one; followed by the gathered operand with `return_gathered`.

    Raises:
      ValueError: operands that do not fit each other, an unknown axis or backend, a call outside
        `shard_map`, an epilogue that is not elementwise, or a backend that cannot serve the call.

    Memory: the fused kernel holds the peers' shards of what is gathered, D - 1 of them; and where
    blocks share tiles (`TileConfig.most_parts`), a tile in float32 for each block.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    for what, flag in (("return_gathered", return_gathered), ("keep_gathered", keep_gathered)):
        checks.check_flag("all_gather_matmul", what, flag)
    asked = Asked(
        epilogue=epilogue,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        config=config,
        backend=backend,
    )
    if lhs_scale is None and rhs_scale is None:
        return plain_gather.gather(
            GATHERS,
            lhs,
            rhs,
            axes,
            asked,
            gather_axis=gather_axis,
            axis=axis,
            return_gathered=return_gathered,
            keep_gathered=keep_gathered,
        )
    return scaled_gather.gather(
        SCALED_GATHER,
        lhs,
        rhs,
        axes,
        lhs_scale,
        rhs_scale,
        asked,
        gather_axis=gather_axis,
        axis=axis,
        returns_gathered=return_gathered or keep_gathered,
    )


@takes_numpy_arrays
@by_default_rules
def matmul_reduce_scatter(
    lhs: jax.Array | Sequence[jax.Array],
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    epilogue: epilogues.Like = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    axis: int = 0,
    lhs_scale: jax.Array | Sequence[jax.Array] | None = None,
    rhs_scale: jax.Array | Sequence[jax.Array] | None = None,
    config: matmul_reduce_scatter_kernel.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = epilogue(reduce_scatter(lhs @ rhs))`, inside `jax.shard_map`; differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | rhs, transposed | `[n, k_shard]` | `[n, D * k_shard]` | columns |
    | out | `[m / D, n]` | `[m, n]` | rows |

    Equals `lax.psum_scatter(lhs @ rhs, axis_name, scatter_dimension=axis, tiled=True)`, also of a
    batch, lhs `[..., k_shard]`. Nothing is copied where `all_gather_matmul` copies nothing;
    otherwise XLA copies lhs into order (`stretto.explain` reports it). The kernel rounds each
    peer's partial product once, to `out_dtype`, adds them to the device's own in float32, always
    in the same order, and rounds the sum; XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices of one type, lhs also a batch of them; the fused kernel takes bfloat16 and
        float16. Or tuples of as many, each pair with a `k_shard` of its own: their products are
        added up, as if they were joined along k, and no copy is made.
      axis_name: mesh axis, or tuple of axes, that the result is scattered over.
      epilogue: as for `all_gather_matmul`, applied once, to the sum; not a gated one. Its arrays
        broadcast to the result of one device.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k_shard]`. No transposed copy is made.
      axis: of lhs and of the result, scattered; may be negative, and not the last one.
      lhs_scale, rhs_scale: scales of operands in 8 bits, as for `all_gather_matmul`, of the
        device's own; of several pairs, which only XLA serves, a tuple each.
      config: of the fused kernel, or `node_config.Config` for several nodes; chosen for the
        shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`, and where m is not a multiple of D.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements, half as many in 8 bits on two devices; and where blocks
    share tiles (`TileConfig.most_parts`), a tile in float32 for each block.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    axis = checks.check_integer("matmul_reduce_scatter", "axis", axis)
    asked = Asked(
        epilogue=epilogue,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        config=config,
        backend=backend,
    )
    if lhs_scale is None and rhs_scale is None:
        return plain_sums.reduce(MATMUL_REDUCE_SCATTER, lhs, rhs, axes, asked, axis=axis)
    of_both = lhs_scale, rhs_scale
    return scaled_sums.reduce(SCALED_REDUCE_SCATTER, lhs, rhs, axes, *of_both, asked, axis=axis)


@takes_numpy_arrays
@by_default_rules
def matmul_all_reduce(
    lhs: jax.Array | Sequence[jax.Array],
    rhs: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    epilogue: epilogues.Like = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | Sequence[jax.Array] | None = None,
    rhs_scale: jax.Array | Sequence[jax.Array] | None = None,
    config: matmul_all_reduce_kernel.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out = epilogue(all_reduce(lhs @ rhs))`, inside `jax.shard_map`; differentiable.

    | operand | per device | whole, over a team of D | sharded along |
    |---|---|---|---|
    | lhs | `[m, k_shard]` | `[m, D * k_shard]` | columns |
    | rhs | `[k_shard, n]` | `[D * k_shard, n]` | rows |
    | rhs, transposed | `[n, k_shard]` | `[n, D * k_shard]` | columns |
    | out | `[m, n]` | `[m, n]` | not sharded: the same on every device |

    Equals `lax.psum(lhs @ rhs, axis_name)`, also of a batch, lhs `[..., k_shard]`. The fused
    kernel rounds partial products once, to `out_dtype`, sums them in float32, and rounds the sum;
    every device holds bitwise the same result. XLA sums in `out_dtype`.

    Args:
      lhs, rhs: matrices, or tuples of matrices, as for `matmul_reduce_scatter`.
      axis_name: mesh axis, or tuple of axes, to sum over.
      epilogue: as for `matmul_reduce_scatter`. All devices must hold the same arrays.
      out_dtype: floating-point type of the result; lhs's by default.
      rhs_transposed: rhs is given as `[n, k_shard]`. No transposed copy is made.
      lhs_scale, rhs_scale: scales of operands in 8 bits, as for `matmul_reduce_scatter`.
      config: of the fused kernel, or `node_config.Config` for several nodes; chosen for the
        shape by default.
      backend: as for `all_gather_matmul`.

    Raises:
      ValueError: as `all_gather_matmul`.

    Memory: the fused kernel holds partial products, for the peers and from them,
    `2 * (D - 1) * m / D * n` elements; and where blocks share tiles (`TileConfig.most_parts`), a
    tile in float32 for each block.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    asked = Asked(
        epilogue=epilogue,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        config=config,
        backend=backend,
    )
    if lhs_scale is None and rhs_scale is None:
        return plain_sums.reduce(MATMUL_ALL_REDUCE, lhs, rhs, axes, asked, axis=None)
    of_both = lhs_scale, rhs_scale
    return scaled_sums.reduce(SCALED_ALL_REDUCE, lhs, rhs, axes, *of_both, asked, axis=None)


# --- Records --------------------------------------------------------------------------------------

GATHERS = matmul_records.of_gathers(all_gather_matmul, matmul_reduce_scatter)
MATMUL_REDUCE_SCATTER = matmul_records.of_reduce_scatter(matmul_reduce_scatter, all_gather_matmul)
MATMUL_ALL_REDUCE = matmul_records.of_all_reduce(matmul_all_reduce)


def _scaled(plain: Operation) -> scaled.Records:
    return {kind: scaled_records.record(kind, plain.public, plain) for kind in scales.GRANULARITIES}


SCALED_GATHER = _scaled(GATHERS["m"])
SCALED_REDUCE_SCATTER = _scaled(MATMUL_REDUCE_SCATTER)
SCALED_ALL_REDUCE = _scaled(MATMUL_ALL_REDUCE)
