"""Blackwell's tensor cores and their memory: right numbers, and mistakes that are found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensor_matmul
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import (
    DeadlockError,
    KernelFaultError,
    UnsupportedKernelError,
    simulate,
)
from stretto.distributed.targets import TARGETS

F32 = jnp.float32


def operands(rows=tensor_matmul.ROWS, k=192, n=384, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(-4, 5, s), jnp.bfloat16) for s in ((rows, k), (k, n))]


def run(pair=False, mistake=None, seed=0, n=384):
    """The report of a matmul, and whether it is right; a mistake may end it early."""
    lhs, rhs = operands(tensor_matmul.ROWS * (1 + pair), n=n)
    with simulate(target="b200", on_finding="record", seed=seed) as report:
        out = np.asarray(tensor_matmul.matmul(lhs, rhs, pair=pair, mistake=mistake))
    return report, (out == np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)).all()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_matmul_is_right(pair, seed):
    report, is_right = run(pair, seed=seed)
    assert report.ok and not report.warnings, str(report)
    assert is_right


MMA, LOAD = "plgpu.tcgen05_mma(", "plgpu.async_load_tmem(accumulator(i))"
MISTAKES = {
    "drain before the commit": ("race", LOAD, "tcgen05_commit_arrive after it"),
    "commit before the product": ("race", LOAD, "tcgen05_commit_arrive after it"),
    "load not waited for": ("race", LOAD, "wait_load_tmem() after it"),
    "accumulator not waited for": ("race", LOAD, "a barrier with orders_tensor_core=True"),
    "barrier without the tensor cores": (
        "unordered tensor cores", LOAD, "Give the barrier orders_tensor_core=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_mistake_is_found_with_both_lines(mistake, pair, seed):
    kind, line, hint = MISTAKES[mistake]
    try:
        report, _ = run(pair, mistake, seed)
    except DeadlockError as error:  # Some of them leave somebody waiting, too.
        report = error.report
    assert any(
        MMA in text and line in text and hint in text
        for text in (f.message for f in report.findings if f.kind == kind)
    ), str(report)


@pytest.mark.parametrize("pair", [False, True])
def test_a_stage_that_is_not_waited_for_is_found(pair):
    with pytest.raises(KernelFaultError, match=r"full.0. expects 2 arrivals a phase and gets one"):
        run(pair, "stage not waited for")


@pytest.mark.parametrize("seed", range(3))
def test_a_missing_cluster_barrier_is_found(seed):
    """The first block must not overwrite the second's accumulator before that one is drained."""
    report, _ = run(pair=True, mistake="no cluster barrier", seed=seed, n=512)
    (race,) = report.findings
    assert race.kind == "race" and "device 0 block 1" in race.message
    assert MMA in race.message and LOAD in race.message
    assert run(pair=True, seed=seed, n=512)[0].ok


def test_the_seed_decides_all():
    first, second = (run(True, "no cluster barrier", seed=5, n=512)[0] for _ in range(2))
    assert str(first) == str(second)


# --- Loads, stores, copies ------------------------------------------------------------------------


def in_one_warpgroup(body, x, *scratch, dtype=F32, out=None):
    struct = jax.ShapeDtypeStruct(x.shape if out is None else out, dtype)
    with simulate(target="b200", on_finding="record") as report:
        result = plgpu.kernel(body, out_type=struct, scratch_types=scratch)(x)
        return np.asarray(result), report


X = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)


@pytest.mark.parametrize("commits", [True, False])
def test_a_store_is_seen_once_it_is_committed(commits):
    def body(x_ref, out_ref, tensor):
        plgpu.async_store_tmem(tensor, plgpu.load(x_ref, layout=plgpu.Layout.TCGEN05))
        if commits:
            plgpu.commit_tmem()
        out_ref[...] = plgpu.async_load_tmem(tensor)

    out, report = in_one_warpgroup(body, X, plgpu.TMEM(X.shape, F32))
    np.testing.assert_array_equal(out, X)
    assert report.ok == commits
    if not commits:
        assert "commit_tmem() after it" in str(report) and "async_store_tmem" in str(report)


@pytest.mark.parametrize("reduction", ["max", "min", "absmax", "absmin"])
def test_a_load_reduces_along_the_rows(reduction):
    def body(x_ref, out_ref, tensor):
        plgpu.async_store_tmem(tensor, plgpu.load(x_ref, layout=plgpu.Layout.TCGEN05))
        plgpu.commit_tmem()
        _, reduced = plgpu.async_load_tmem(tensor, reduce=reduction)
        out_ref[...] = reduced

    x = X - 3000
    with simulate(target="b200", check_hardware=False) as report:
        struct = jax.ShapeDtypeStruct((128,), F32)
        out = plgpu.kernel(body, out_type=struct, scratch_types=[plgpu.TMEM(X.shape, F32)])(x)
    assert report.ok
    of = np.abs(x) if "abs" in reduction else x
    np.testing.assert_array_equal(out, getattr(of, reduction.removeprefix("abs"))(axis=1))


def test_memory_that_nobody_has_written_is_told():
    def body(x_ref, out_ref, tensor):
        out_ref[...] = plgpu.async_load_tmem(tensor)

    out, report = in_one_warpgroup(body, X, plgpu.TMEM(X.shape, F32))
    assert report.kinds() == {"uninitialised"} and np.isnan(out).all()
    assert "tensor in tensor memory of device 0 block 0" in str(report)


def test_a_product_that_nobody_waits_for_is_told():
    def body(x_ref, out_ref, a, landed, tensor):
        plgpu.copy_gmem_to_smem(x_ref, a, landed)
        plgpu.barrier_wait(landed)
        rhs = a.at[pl.ds(0, 64)]
        plgpu.tcgen05_mma(tensor, a, rhs, accumulate=False)

    x = np.ones((128, 64), jnp.bfloat16)
    smem = plgpu.SMEM(x.shape, x.dtype, transforms=tensor_matmul.LAYOUT)
    _, report = in_one_warpgroup(
        body, x, smem, plgpu.Barrier(), plgpu.TMEM((128, 64), F32), dtype=x.dtype
    )
    assert report.kinds() == {"unawaited copy"}, str(report)
    assert "a wait on the barrier of a commit that is after" in str(report)


def test_an_operand_that_was_stored_has_to_be_committed():
    def body(x_ref, out_ref, a, landed, done, tensor):
        plgpu.copy_gmem_to_smem(x_ref, a, landed)
        plgpu.barrier_wait(landed)
        a[...] = a[...] * 2
        plgpu.tcgen05_mma(tensor, a, a.at[pl.ds(0, 64)], done, accumulate=False)
        plgpu.barrier_wait(done)
        out_ref[...] = plgpu.async_load_tmem(tensor)

    x = np.ones((128, 64), jnp.bfloat16)
    smem = plgpu.SMEM(x.shape, x.dtype, transforms=tensor_matmul.LAYOUT)
    done = plgpu.Barrier(orders_tensor_core=True)
    tensor = plgpu.TMEM((128, 64), F32)
    out, report = in_one_warpgroup(body, x, smem, plgpu.Barrier(), done, tensor, out=(128, 64))
    np.testing.assert_array_equal(out, np.full((128, 64), 256))
    assert report.kinds() == {"uncommitted store"}, str(report)


def arranged(scales):
    """Scales as `async_copy_scales_to_tmem` wants them."""
    rows, columns = scales.shape
    apart = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return apart.transpose(0, 3, 2, 1, 4).reshape(rows // 128, columns // 4, 32, 16)


def test_products_with_block_scales():
    """fp8 with a scale for each 32 elements along the contraction, `[m, k]` and `[n, k]`."""
    rng = np.random.default_rng(0)
    m, n, k = 128, 128, 256
    fp8, e8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    lhs, rhs = (rng.integers(-4, 5, s).astype(fp8) for s in ((m, k), (n, k)))
    scales = [2.0 ** rng.integers(-2, 3, (r, k // 32)) for r in (m, n)]
    layout = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    orders = plgpu.Barrier(orders_tensor_core=True)

    def body(a_ref, b_ref, sa_ref, sb_ref, out_ref, a, b, sa, sb, ta, tb, total, landed, done):
        for source, smem in ((a_ref, a), (b_ref, b), (sa_ref, sa), (sb_ref, sb)):
            plgpu.copy_gmem_to_smem(source, smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.async_copy_scales_to_tmem(sa, ta)
        plgpu.async_copy_scales_to_tmem(sb, tb)
        right = b.transpose((1, 0))
        plgpu.tcgen05_mma(total, a, right, done, a_scale=ta, b_scale=tb, accumulate=False)
        plgpu.barrier_wait(done)
        out_ref[...] = plgpu.async_load_tmem(total)

    scale_smem = plgpu.SMEM((1, k // 128, 32, 16), e8)
    scale_tmem = plgpu.TMEM((128, k // 32), e8, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
    with simulate(target="b200") as report:
        out = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((m, n), F32),
            scratch_types=[
                plgpu.SMEM((m, k), fp8, transforms=layout),
                plgpu.SMEM((n, k), fp8, transforms=layout),
                *[scale_smem] * 2, *[scale_tmem] * 2, plgpu.TMEM((m, n), F32),
                plgpu.Barrier(num_arrivals=4), orders,
            ],
        )(lhs, rhs, *(arranged(s).astype(e8) for s in scales))  # fmt: skip
    assert report.ok, str(report)
    wide = [
        np.asarray(x, np.float32) * np.repeat(s, 32, axis=1)
        for x, s in zip((lhs, rhs), scales, strict=True)
    ]
    np.testing.assert_array_equal(out, (wide[0] @ wide[1].T).astype(np.float32))


@pytest.mark.parametrize("n", [128, 256])
def test_products_with_block_scales_of_pairs_with_64_rows_each(n):
    """The arrangement of rhs's scales has the second half of the columns begin at lane 128."""
    m, k, e8, fp8 = 128, 128, jnp.float8_e8m0fnu, jnp.float8_e4m3fn
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(-4, 5, (rows, k)), fp8) for rows in (m, n))
    of_lhs, of_rhs = (2.0 ** rng.integers(-2, 3, (rows, k // 32)) for rows in (m, n))
    # A block's rows are filled up to 128.
    filled = np.concatenate([np.pad(half, ((0, 64), (0, 0))) for half in np.split(of_lhs, 2)])
    halves = of_rhs.reshape(2, n // 64, 32, 1, 4).transpose(3, 0, 2, 1, 4)
    halves = halves.reshape(1, 1, 64, n // 16)
    halves = np.pad(halves, ((0, 0), (0, 0), (0, 0), (0, 16 - n // 16)))
    layout = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    leading = dict(collective_axes="x", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))
    everyone = dict(collective_axes="x", leader_tracked=plgpu.CopyPartition.REPLICATED)

    def body(a_ref, b_ref, sa_ref, sb_ref, out_ref, a, b, sa, sb, ta, tb, total, landed, done):
        for source, smem in ((a_ref, a), (b_ref, b), (sa_ref, sa)):
            plgpu.copy_gmem_to_smem(source, smem, landed, **leading)
        plgpu.copy_gmem_to_smem(sb_ref, sb, landed, **everyone)
        rank = lax.axis_index("x")

        @pl.when(rank == 0)
        def _():
            plgpu.barrier_wait(landed)
            plgpu.async_copy_scales_to_tmem(sa, ta, collective_axis="x")
            plgpu.async_copy_scales_to_tmem(sb, tb, collective_axis="x")
            plgpu.tcgen05_mma(
                total, a, b.transpose((1, 0)), done, a_scale=ta, b_scale=tb, accumulate=False,
                collective_axis="x",
            )  # fmt: skip

        plgpu.barrier_wait(done)
        out_ref[pl.ds(rank * 64, 64), :] = plgpu.async_load_tmem(total)

    layouts = plgpu.TMEMLayout
    scratch = [
        plgpu.SMEM((64, k), fp8, transforms=layout),
        plgpu.SMEM((n // 2, k), fp8, transforms=layout),
        plgpu.SMEM((1, 1, 32, 16), e8),
        plgpu.SMEM((1, 1, 64, 16), e8),
        plgpu.TMEM((128, 4), e8, layout=layouts.SCALES_LAYOUT, collective=True),
        plgpu.TMEM((256, 4), e8, layout=layouts.SCALES_M64_COLLECTIVE_LAYOUT, collective=True),
        plgpu.TMEM((64, n), F32, collective=True, layout=layouts.M64_COLLECTIVE_LAYOUT(n)),
        plgpu.Barrier(num_arrivals=4),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    with simulate(target="b200", on_finding="record") as report:
        out = plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct((m, n), F32), scratch_types=scratch,
            cluster=(2,), cluster_names=("x",),
        )(lhs, rhs, arranged(filled).astype(e8), jnp.asarray(halves, e8))  # fmt: skip
    assert report.ok, str(report)
    wide = [
        np.asarray(x, np.float32) * np.repeat(s, 32, axis=1)
        for x, s in ((lhs, of_lhs), (rhs, of_rhs))
    ]
    np.testing.assert_array_equal(out, (wide[0] @ wide[1].T).astype(np.float32))


def test_scales_in_another_arrangement_are_refused():
    def body(x_ref, out_ref, smem, tensor):
        plgpu.async_copy_scales_to_tmem(smem, tensor)

    e8, layout = jnp.float8_e8m0fnu, plgpu.TMEMLayout.SCALES_LAYOUT
    scratch = plgpu.SMEM((1, 1, 16, 32), e8), plgpu.TMEM((128, 4), e8, layout=layout)
    with pytest.raises(UnsupportedKernelError, match=r"scales of shape \(1, 1, 16, 32\)"):
        in_one_warpgroup(body, np.ones(128, np.float32), *scratch)


def test_a_copy_into_tensor_memory():
    def body(x_ref, out_ref, smem, tensor, landed, done):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.async_copy_smem_to_tmem(smem, tensor)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        out_ref[...] = plgpu.async_load_tmem(tensor)

    layout = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    scratch = plgpu.SMEM(X.shape, F32, transforms=layout), plgpu.TMEM(X.shape, F32)
    barriers = plgpu.Barrier(), plgpu.Barrier(orders_tensor_core=True)
    out, report = in_one_warpgroup(body, X, *scratch, *barriers)
    np.testing.assert_array_equal(out, X)
    assert report.ok, str(report)


def test_tensor_memory_of_three_dimensions():
    def body(x_ref, out_ref, tensor):
        x = plgpu.load(x_ref, layout=plgpu.Layout.TCGEN05)
        plgpu.async_store_tmem(tensor.at[0], x)
        plgpu.async_store_tmem(tensor.at[1], 2 * x)
        plgpu.commit_tmem()
        out_ref[...] = plgpu.async_load_tmem(tensor.at[0]) + plgpu.async_load_tmem(tensor.at[1])

    out, report = in_one_warpgroup(body, X, plgpu.TMEM((2, *X.shape), F32))
    np.testing.assert_array_equal(out, 3 * X)
    assert report.ok, str(report)


# --- What a target has ----------------------------------------------------------------------------


def test_more_columns_than_there_are():
    def body(x_ref, out_ref, first, second):
        out_ref[...] = x_ref[...]

    x = np.ones(128, np.float32)
    sizes = plgpu.TMEM((128, 512), F32), plgpu.TMEM((128, 64), F32)
    _, report = in_one_warpgroup(body, x, *sizes)
    (flaw,) = report.findings
    assert flaw.kind == "hardware limit"
    assert "needs 576 columns of tensor memory, and has at most 512" in flaw.message
    assert "first (128x512 float32) 512" in flaw.message


def test_an_unknown_target():
    with (
        pytest.raises(ValueError, match="target='b300' must be one of h100, b200"),
        simulate(target="b300"),
    ):
        pass


def test_targets_are_those_that_kernels_are_compiled_for():
    from stretto.distributed.tools import aot

    for name, target in TARGETS.items():
        text = (aot.TARGETS / f"{name}.txtpb").read_text()
        assert f"major: {target.capability[0]}" in text
        assert f"core_count: {target.multiprocessors}" in text


def test_a_kernel_is_prepared_anew_for_another_target():
    """The same jitted function: what JAX keeps of one target is not used for the other."""

    @jax.jit
    def fn(lhs, rhs):
        return tensor_matmul.matmul(lhs, rhs)

    lhs, rhs = operands()
    with simulate(target="b200") as report:
        jax.block_until_ready(fn(lhs, rhs))
    assert report.ok
    with pytest.raises(Exception, match="simulate a B200 with simulate"), simulate():
        jax.block_until_ready(fn(lhs, rhs))
