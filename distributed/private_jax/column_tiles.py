"""A right operand of `plgpu.wgmma` that lies in shared memory one column of tiles after another.

Tensor cores take tiles of 8 x 64 at any two distances from each other, down and across. JAX's
lowering of `plgpu.wgmma` takes them in one order, that of `plgpu.TilingTransform`: all tiles of 8
rows, then those of the next 8. The copy engine fills consecutive memory, so in that order each tile
of an array that is not made of whole ones takes a copy of its own; column by column a copy fills
all rows of one. Such an operand is lowered here, and any other by JAX's own rule. Private JAX,
checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering as gpu_lowering
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.state import types as state_types
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxlib.mosaic.python import mosaic_gpu as dialect

_SEMANTICS = gpu_core.WGxWG_SEMANTICS
_COLUMNS_LAST = (1, 0, 2)
_SWIZZLE = 128
_TILE = 8, 64

_lowered_by_jax = gpu_lowering.mosaic_lowering_rules[_SEMANTICS][gpu_primitives.wgmma_p]


def side_by_side(ref: Any) -> Any:
    """Columns of tiles `[columns / 64, rows, 64]` as a right operand `[rows, columns]` of `wgmma`.

    `ref` is in shared memory, of elements of 16 bits, with the transforms of `wgmma`'s operands:
    tiles of 8 x 64, swizzled by 128 bytes. The left operand is in shared memory, too. Nothing but
    `plgpu.wgmma` takes what is returned.
    """
    across, rows, columns = ref.shape
    return ref.transpose(_COLUMNS_LAST).reshape(rows, across * columns)


def are_side_by_side(transforms: Any) -> bool:
    """Whether the last transforms of a ref are those of `side_by_side`."""
    match transforms:
        case [*_, state_types.TransposeTransform(permutation), state_types.ReshapeTransform()]:
            return tuple(permutation) == _COLUMNS_LAST
    return False


def _wgmma_lowering(ctx: Any, acc: Any, a: Any, b: Any, *leaves: Any, **trees: Any) -> Any:
    values, avals = iter(leaves), iter(ctx.avals_in[3:])
    of_acc, of_a, of_b = (
        [_transforms(trees[f"{name}_transforms_tree"], x) for x in (values, avals)]
        for name in ("acc", "a", "b")
    )
    if not are_side_by_side(of_b[0]):
        return _lowered_by_jax(ctx, acc, a, b, *leaves, **trees)
    if of_acc[0]:
        raise NotImplementedError("a part of an accumulator, with rhs side by side")
    _, aval_a, aval_b = ctx.avals_in[:3]
    a, _, _ = gpu_lowering._handle_transforms(ctx, aval_a, a, of_a[1], of_a[0])
    b, _, _ = gpu_lowering._handle_transforms(ctx, aval_b, b, of_b[1][:-2], of_b[0][:-2])
    return _multiplied(ctx, acc, a, b)


def _transforms(tree: Any, leaves: Any) -> Any:
    """The transforms of an operand, of which `leaves` are the next."""
    return () if tree is None else tree.unflatten([next(leaves) for _ in range(tree.num_leaves)])


def _multiplied(ctx: Any, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """The accumulator after the product: an operation that holds what it is lowered to."""
    layout = mgpu.layouts.to_layout_attr(mgpu.WGMMA_LAYOUT)
    tiled = ir.ArrayAttr.get(
        [mgpu.TileTransform(_TILE).to_attr(), dialect.SwizzleTransformAttr.get(_SWIZZLE)]
    )
    specs: dict[str, Any] = dict(in_layouts=[layout], in_transforms=[tiled, tiled])
    op = dialect.CustomPrimitiveOp(
        result=[acc.type], operands_=[acc, a, b], out_layouts=[layout], **specs
    )
    gpu_primitives._populate_custom_primitive_op_block(
        ctx,
        op.body.blocks.append(acc.type, a.type, b.type),
        _multiply,
        pytree_args=jax.tree.structure((0, 0, 0)),
        results_ty=[acc.type],
        out_layouts=[layout],
        **specs,
    )
    (result,) = gpu_lowering._isolate_from_above(op).results
    commit = "wgmma.commit_group.sync.aligned;"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], commit, "", has_side_effects=True)
    return result


def _multiply(_: Any, acc: Any, a: ir.Value, b: ir.Value) -> Any:
    """Issues the instructions for tiles `b` `[across, down, 1, 8, 64]`."""
    tiles = mgpu_utils.memref_slice(b, (slice(None), slice(None), 0))
    transposed = mgpu_utils.memref_transpose(tiles, (1, 0, 2, 3))
    started = mgpu.wgmma(
        mgpu.WGMMAAccumulator.from_registers(acc, sync=False), a, transposed, swizzle=_SWIZZLE
    )
    return started.value.to_layout(mgpu.WGMMA_LAYOUT)


gpu_lowering.register_lowering_rule(gpu_primitives.wgmma_p, *_SEMANTICS)(_wgmma_lowering)
