"""A matmul on Blackwell's tensor cores, by one block or a pair, with mistakes to be found.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `full[stage]` | both copies into it | issuing warp | the stage holds a tile of lhs and of rhs |
| `empty[stage]` | the tensor cores | loading warp | the products have read the stage |
| `made[half]` | the tensor cores | draining warpgroup | the accumulator holds a tile's total |
| `drained[half]` | draining warpgroup | issuing warp | the accumulator has been read |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 64, 64  # of a tile of one block
STAGES = 2
LAYOUT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def matmul(lhs, rhs, *, pair=False, mistake=None):
    """`[ROWS or twice, k] @ [k, n]`, bfloat16 to float32, with `mistake` or none."""
    (m, k), n = lhs.shape, rhs.shape[1]
    blocks, axis = (2, "c") if pair else (1, None)
    columns = COLUMNS * blocks
    tiles, steps = n // columns, k // DEPTH

    def body(lhs_ref, rhs_ref, out_ref, a, b, totals, full, empty, made, drained):
        warpgroup = lax.axis_index("wg")
        block = lax.axis_index("c")

        def accumulator(i):
            return totals.at[:, pl.ds(lax.rem(i, 2) * columns, columns)]

        def each(step):
            lax.fori_loop(0, tiles * steps, lambda j, _: step(lax.div(j, steps), j), None)

        def load():
            def step(i, j):
                stage = lax.rem(j, STAGES)
                if mistake != "stage not waited for":
                    pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(empty.at[stage]))
                depth = pl.ds(lax.rem(j, steps) * DEPTH, DEPTH)
                windows = lhs_ref.at[:, depth], rhs_ref.at[depth, pl.ds(i * columns, columns)]
                for dim, (window, smem) in enumerate(zip(windows, (a, b), strict=True)):
                    shared = dict(
                        collective_axes=axis, leader_tracked=plgpu.CopyPartition.PARTITIONED(dim)
                    )
                    plgpu.copy_gmem_to_smem(
                        window, smem.at[stage], full.at[stage], **(shared if pair else {})
                    )

            each(step)

        def multiply():
            def step(i, j):
                stage, first = lax.rem(j, STAGES), lax.rem(j, steps) == 0
                half, last = lax.rem(i, 2), lax.rem(j, steps) == steps - 1
                if mistake != "accumulator not waited for":
                    pl.when(first & (i >= 2))(lambda: plgpu.barrier_wait(drained.at[half]))
                plgpu.barrier_wait(full.at[stage])

                def commit():
                    plgpu.tcgen05_commit_arrive(made.at[half], collective_axis=axis)

                if mistake == "commit before the product":
                    pl.when(last)(commit)
                plgpu.tcgen05_mma(
                    accumulator(i), a.at[stage], b.at[stage], empty.at[stage],
                    accumulate=~first, collective_axis=axis,
                )  # fmt: skip
                if mistake != "commit before the product":
                    pl.when(last)(commit)

            each(step)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load)
                pl.when((warp == 1) & (block == 0))(multiply)

        @pl.when(warpgroup == 1)
        def _():
            @pl.loop(0, tiles)
            def _(i):
                if mistake != "drain before the commit":
                    plgpu.barrier_wait(made.at[lax.rem(i, 2)])
                total = plgpu.async_load_tmem(accumulator(i))
                if mistake != "load not waited for":
                    plgpu.wait_load_tmem()
                out_ref[pl.ds(block * ROWS, ROWS), pl.ds(i * columns, columns)] = total
                plgpu.barrier_arrive(drained.at[lax.rem(i, 2)])

    orders = dict(orders_tensor_core=True)
    drained_orders = {} if mistake == "barrier without the tensor cores" else orders
    drained = plgpu.Barrier(num_barriers=2, **drained_orders)
    if pair and mistake != "no cluster barrier":
        drained = plgpu.ClusterBarrier(collective_axes=("c",), num_barriers=2, **drained_orders)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), lhs.dtype, transforms=LAYOUT),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), rhs.dtype, transforms=LAYOUT),
            plgpu.TMEM((ROWS, 2 * columns), jnp.float32, collective=pair),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, **orders),
            plgpu.Barrier(num_barriers=2, **orders),
            drained,
        ],
        num_threads=2,
        thread_name="wg",
        cluster=(blocks,),
        cluster_names=("c",),
    )(lhs, rhs)
