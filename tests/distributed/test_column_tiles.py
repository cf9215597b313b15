"""A right operand in columns of tiles: what `wgmma` makes of it, and in which order it must lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.private_jax.column_tiles import side_by_side
from stretto.distributed.simulator import UnsupportedKernelError, simulate
from stretto.distributed.tools import aot

BF16, F32 = jnp.bfloat16, jnp.float32
SWIZZLE = plgpu.SwizzleTransform(128)
IN_TILES = (plgpu.TilingTransform((8, 64)), SWIZZLE)
COLUMNS = 128


def multiply(lhs, rhs, *, view=side_by_side):
    """`lhs @ rhs`, `[64, 64] @ [64, 120]` and zeros; rhs by a copy for each column of tiles."""

    def body(lhs_ref, rhs_ref, out_ref, a, b, landed):
        multiplied, copied = b
        plgpu.copy_gmem_to_smem(lhs_ref, a, landed)

        @pl.loop(0, COLUMNS // 64)
        def _(column):
            window = rhs_ref.at[:, pl.ds(64 * column, 64)]
            plgpu.copy_gmem_to_smem(window, copied.at[column], landed)

        plgpu.barrier_wait(landed)

        def product(acc):
            plgpu.wgmma(acc, a, view(multiplied))
            return acc[...]

        out_ref[...] = pl.run_scoped(product, plgpu.ACC((64, COLUMNS), F32))

    columns = COLUMNS // 64, 64, 64
    scratch = [
        plgpu.SMEM((64, 64), BF16, transforms=IN_TILES),
        plgpu.RefUnion(
            plgpu.SMEM(columns, BF16, transforms=IN_TILES),
            plgpu.SMEM(columns, BF16, transforms=(SWIZZLE,)),
        ),
        plgpu.Barrier(num_arrivals=1 + COLUMNS // 64),
    ]
    out = jax.ShapeDtypeStruct((64, COLUMNS), F32)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch)(lhs, rhs)


def test_columns_of_tiles_are_multiplied_side_by_side():
    lhs, rhs = (
        jax.random.randint(jax.random.key(seed), (64, n), -3, 4).astype(BF16)
        for seed, n in enumerate((64, 120))
    )
    with simulate() as report:
        out = jax.block_until_ready(multiply(lhs, rhs))
    assert report.ok, str(report)
    wanted = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    np.testing.assert_array_equal(out, np.pad(wanted, ((0, 0), (0, 8))))


def test_another_order_of_the_columns_is_refused():
    def last_first(ref):
        return ref.transpose((1, 2, 0)).reshape(64, COLUMNS)

    operands = jnp.ones((64, 64), BF16), jnp.ones((64, 120), BF16)
    with pytest.raises(UnsupportedKernelError, match="reshape of a strided ref"), simulate():
        multiply(*operands, view=last_first)


@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
def test_descriptors_of_the_tensor_cores():
    """Tiles of 64 columns are 8 KiB apart, and those of 8 rows 1 KiB."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = [jax.ShapeDtypeStruct((64, n), BF16, sharding=whole) for n in (64, 120)]
    (kernel,) = aot.compile_program(multiply, *operands).kernels
    across, down, swizzled = (64 * 128 >> 4) << 16, (8 * 128 >> 4) << 32, 1 << 62
    assert str(across | down | swizzled) in kernel.ptx
    assert kernel.ptx.count("wgmma.mma_async") == 4 and not kernel.warnings
