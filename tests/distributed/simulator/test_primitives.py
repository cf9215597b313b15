"""Every primitive that Mosaic GPU lowers is known to the simulator, or refused with a reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import KernelFaultError, UnsupportedKernelError, simulate
from stretto.distributed.simulator.program import RULES
from stretto.distributed.simulator.refusals.unsupported import BLACKWELLS, HOPPERS, REFUSED

X = np.arange(128, dtype=np.float32)
F32 = jnp.float32


def run(body, scratch=(), target="h100", **settings):
    with simulate(target=target) as report:
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
            scratch_types=scratch,
            **settings,
        )
        out = np.asarray(kernel(X))
    assert report.ok, str(report)
    return out


def lowered_by_mosaic():
    """Names of the primitives that the installed JAX lowers, in lane or warpgroup semantics."""
    registries = lowering.mosaic_lowering_rules.values()
    return {primitive.name for registry in registries for primitive in registry}


def test_every_primitive_that_mosaic_lowers_is_accounted_for():
    new = {
        name
        for name in lowered_by_mosaic()
        if not {name, name.removesuffix("_p")} & (RULES.keys() | REFUSED.keys())
    }
    assert not new, f"JAX {jax.__version__} lowers these, too: give each a rule or a refusal"


def test_nothing_is_both_known_and_refused():
    """But for device code, of which the fences that JAX inserts are known."""
    assert RULES.keys() & REFUSED.keys() == {"inline_mgpu"}


def test_what_one_target_alone_has_is_known():
    assert RULES.keys() >= (BLACKWELLS.keys() | HOPPERS.keys()) - REFUSED.keys()


def refusal(body, scratch=(), **settings) -> str:
    with pytest.raises(UnsupportedKernelError) as error:
        run(body, scratch, **settings)
    return str(error.value)


def test_device_code_is_refused_with_its_line():
    def body(x_ref, out_ref):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def double(_, ref): ...

        double(x_ref)
        out_ref[...] = x_ref[...]

    text = refusal(body)
    assert "double(x_ref)" in text and "test_primitives.py" in text
    assert "is_simulating() says so, do the same with operations of Pallas" in text


def test_dynamic_scheduling_is_refused_with_the_line_of_the_kernel():
    """JAX keeps the innermost lines alone, all of them its own; that of the loop is added."""

    def body(x_ref, out_ref):
        @plgpu.dynamic_scheduling_loop(("b",))
        def _(_):
            out_ref[...] = x_ref[...]

    text = refusal(body, grid=(2,), grid_names=("b",))
    assert "plgpu.nd_loop" in text and 'simulate(target="b200")' in text
    assert "test_dynamic_scheduling" in text and '@plgpu.dynamic_scheduling_loop(("b",))' in text


def test_tensor_memory_is_refused_on_hopper():
    def body(x_ref, out_ref, tensor_memory):
        plgpu.async_store_tmem(tensor_memory, jnp.zeros((128, 128), F32))
        out_ref[...] = x_ref[...]

    def no_operation(x_ref, out_ref, _):
        out_ref[...] = x_ref[...]

    text = refusal(body, [plgpu.TMEM((128, 128), F32)])
    assert "plgpu.ACC" in text and "stretto simulate --target b200" in text
    with simulate(on_finding="record") as report:
        kernel = plgpu.kernel(
            no_operation,
            out_type=jax.ShapeDtypeStruct(X.shape, F32),
            scratch_types=[plgpu.TMEM((128, 128), F32)],
        )
        jax.block_until_ready(kernel(X))
    (flaw,) = report.findings
    assert flaw.kind == "hardware limit" and "128 columns of tensor memory" in flaw.message
    assert "an H100 has none" in flaw.message


def test_wgmma_is_refused_on_blackwell():
    def body(x_ref, out_ref, smem):
        def scope(acc):
            plgpu.wgmma(acc, smem, smem)

        pl.run_scoped(scope, plgpu.ACC((64, 64), F32))
        out_ref[...] = x_ref[...]

    layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    smem = plgpu.SMEM((64, 64), jnp.float16, transforms=layout)
    text = refusal(body, [smem], target="b200")
    assert "plgpu.wgmma is Hopper's alone" in text and "plgpu.tcgen05_mma" in text


def test_sparse_products_are_refused_everywhere():
    def body(x_ref, out_ref, smem, metadata):
        plgpu.async_copy_sparse_metadata_to_tmem(smem, metadata)
        out_ref[...] = x_ref[...]

    metadata = plgpu.TMEM((128, 64), jnp.uint2, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT)
    smem = plgpu.SMEM((1, 1, 128, 64), jnp.uint2)
    assert "sparse operand" in refusal(body, [smem, metadata], target="b200")


def test_tensor_memory_in_turn_is_refused():
    def body(x_ref, out_ref, refs):
        out_ref[...] = x_ref[...]

    refs = plgpu.RefUnion(plgpu.TMEM((128, 128), F32), plgpu.TMEM((128, 64), F32))
    text = refusal(body, [refs], target="b200")
    assert "a union in memory space tmem" in text and "one by one" in text


def test_global_scratch_is_refused():
    def body(x_ref, out_ref, _):
        out_ref[...] = x_ref[...]

    assert "one more result" in refusal(body, [plgpu.GMEM((128,), F32)])


@pytest.mark.parametrize("waits", [True, False])
def test_copies_without_a_barrier_are_refused(waits):
    def body(x_ref, out_ref, smem):
        plgpu.copy_gmem_to_smem(x_ref, smem)
        if waits:
            plgpu.wait_gmem_to_smem(0)
        out_ref[...] = smem[...]

    assert "give copy_gmem_to_smem a plgpu.Barrier" in refusal(body, [plgpu.SMEM((128,), F32)])


def test_refusal_inside_a_loop_of_jax_names_the_kernels_line():
    def body(x_ref, out_ref):
        def step(_, x_smem, out_smem):
            out_smem[...] = lax.cumlogsumexp(x_smem[...])

        spec = plgpu.BlockSpec((64,), lambda i: (i,))
        plgpu.emit_pipeline(step, grid=(2,), in_specs=[spec], out_specs=[spec])(x_ref, out_ref)

    text = refusal(body)
    assert "does not know the primitive 'cumlogsumexp'" in text and "test_primitives.py" in text


@pytest.mark.parametrize(
    ("params", "reason"), [(plgpu.CompilerParams(), "for no GPU"), (None, "for Triton")]
)
def test_pallas_call_is_refused(params, reason):
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    call = pl.pallas_call(double, out_shape=jax.typeof(jnp.asarray(X)), compiler_params=params)
    with pytest.raises(UnsupportedKernelError, match=reason) as error, simulate():
        call(X)
    assert "write it with plgpu.kernel" in str(error.value)
    assert "double at " in str(error.value) and "test_primitives.py" in str(error.value)
    with pytest.raises(ValueError, match="interpret mode"):
        call(X)
    interpreted = pl.pallas_call(double, out_shape=jax.typeof(jnp.asarray(X)), interpret=True)
    with simulate():
        np.testing.assert_array_equal(interpreted(X), 2 * X)


@pytest.mark.parametrize("enabled", [False, True])
def test_debug_checks(enabled):
    def body(x_ref, out_ref):
        pl.debug_check(jnp.sum(x_ref[...]) >= 0, "never")
        pl.debug_check(jnp.sum(x_ref[...]) < 0, "the sum is negative")
        out_ref[...] = x_ref[...]

    with pl.enable_debug_checks(enabled):
        if not enabled:
            np.testing.assert_array_equal(run(body), X)
            return
        with pytest.raises(KernelFaultError, match="the sum is negative") as error:
            run(body)
    assert "pl.debug_check(jnp.sum(x_ref[...]) < 0" in str(error.value)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint32", "bfloat16", "float32"])
def test_state_has_its_type(dtype):
    """What `run_state` gives back goes on as the scalar or array that it is."""

    def body(x_ref, out_ref):
        def change(refs):
            one, many = refs
            one[...] = one[...] ^ True if dtype == "bool" else one[...] - 5
            many[...] += 1

        one, many = pl.run_state(change)((x_ref[1].astype(dtype), x_ref[...]))
        shifted = one >> 31 if dtype.endswith("int32") else one
        out_ref[...] = jnp.where(many > 3, many, shifted.astype(F32))

    wanted = {"bool": 0, "int32": -1, "uint32": 1, "bfloat16": -4, "float32": -4}[dtype]
    np.testing.assert_array_equal(run(body), np.where(X + 1 > 3, X + 1, wanted))


def test_state_gives_back_what_its_body_returns():
    """Mosaic GPU puts what the body returns in the place of the first values."""

    def body(x_ref, out_ref):
        def multiply(accumulator):
            return lax.fori_loop(0, 3, lambda _, y: y + accumulator[...], accumulator[...])

        def both(refs):
            refs[1][...] += 100
            return refs[0][...] + 1

        first = pl.run_state(multiply)(plgpu.ACC.init(jnp.ones((64, 64), F32)))[0, 0]
        returned, remaining = pl.run_state(both)((x_ref[...], x_ref[...] * 2))
        out_ref[...] = first * returned + 1000 * remaining

    np.testing.assert_array_equal(run(body), 4 * (X + 1) + 1000 * X)
