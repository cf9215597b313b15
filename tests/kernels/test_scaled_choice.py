"""What `auto` takes on 2 H200s for operands in 8 bits: what was measured, and nothing else."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import pytest
from fused_cases import F32
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3

import stretto as st
from stretto.kernels.choice import choose
from stretto.kernels.problem.machine import Machine

GATHER = "all_gather_matmul"


@pytest.fixture
def on_h200(monkeypatch):
    gpu = Machine(platform="gpu", kind="NVIDIA H200")
    monkeypatch.setattr(Machine, "of_mesh", classmethod(lambda cls: gpu))
    monkeypatch.setattr(choose, "_unsuitable_devices", lambda problem: None)


def explained(name=GATHER, *, m=8192, k=8192, n=8192, granularity="row", **options):
    """The choice for m x k x n over two devices."""
    rows = dict(all_gather_matmul=2, matmul_reduce_scatter=1)[name]
    k_own = k if rows == 2 else k // 2
    # Of "n" the transposed problem has these sizes.
    lhs, rhs = (m // rows, k_own), (n // rows, k_own)
    lhs, rhs = (rhs, lhs) if options.get("gather_axis") == "n" else (lhs, rhs)
    shapes = [(lhs[0], 1), (rhs[0], 1)]
    if granularity == "block":
        shapes = [(lhs[0], k_own // 128), (rhs[0] // 128, k_own // 128)]
    found: list = []

    def call(x, y, s, t):
        scales = dict(lhs_scale=s, rhs_scale=t)
        call = getattr(st, name)
        found.append(st.explain(call, x, y, "x", rhs_transposed=True, **scales, **options))
        return jnp.zeros(())

    program = jax.shard_map(
        call, mesh=cases.mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    values = [jax.ShapeDtypeStruct(shape, E4M3) for shape in (lhs, rhs)]
    jax.eval_shape(program, *values, *(jax.ShapeDtypeStruct(shape, F32) for shape in shapes))
    return found[0]


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("name", [GATHER, "matmul_reduce_scatter"])
def test_the_kernel_where_it_was_measured_to_be_faster(on_h200, name, granularity):
    choice = explained(name, granularity=granularity)
    assert choice.backend == "pallas" and "of XLA's time" in choice.reason
    assert choice.fused_us < choice.xla_us


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (GATHER, dict(m=2048)),
        (GATHER, dict(m=3000, k=7168, n=20480)),
        ("matmul_reduce_scatter", dict(m=4096, k=4096, n=5120)),
        ("matmul_reduce_scatter", dict(m=2048, k=28672)),
    ],
)
def test_the_kernel_between_and_below_the_square_shapes(on_h200, name, sizes):
    choice = explained(name, **sizes)
    assert choice.backend == "pallas" and "of XLA's time" in choice.reason


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_the_kernel_for_groups(on_h200, granularity):
    """XLA multiplies all rows by each group's matrix."""
    m, k, n, groups = 60000, 2048, 1536, 32
    shapes = [(m, 1), (groups, n, 1)]
    if granularity == "block":
        shapes = [(m, k // 128), (groups, n // 128, k // 128)]
    found: list = []

    def call(x, y, sizes, s, t):
        options = dict(rhs_transposed=True, lhs_scale=s, rhs_scale=t)
        found.append(st.explain(st.grouped_matmul, x, y, sizes, **options))
        return jnp.zeros(())

    operands = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((m, k), (groups, n, k))]
    scales = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    jax.eval_shape(call, *operands, jax.ShapeDtypeStruct((groups,), jnp.int32), *scales)
    assert found[0].backend == "pallas" and "of XLA's time" in found[0].reason


@pytest.mark.parametrize(
    "changes",
    [
        dict(m=128),
        dict(m=64, n=28672),
        dict(granularity="block", m=512),
        dict(name="matmul_reduce_scatter", m=512),
        dict(out_dtype=F32),
    ],
    ids=str,
)
def test_xla_where_nothing_was_measured(on_h200, changes):
    choice = explained(**changes)
    assert choice.backend == "xla" and "never timed beside XLA" in choice.reason


def test_xla_where_rows_are_put_in_order_besides(on_h200):
    """As for weights of fully sharded data parallelism: the same kernel, and a copy."""
    choice = explained(gather_axis="n")
    assert choice.problem.copied and choice.backend == "xla"
    assert "never with copies" in choice.reason
