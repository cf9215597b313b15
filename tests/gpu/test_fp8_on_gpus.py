"""Operands in 8 bits with scales, on GPUs: exact on whole numbers, and as good as XLA on others."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import F32
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3, E5M2, NAMES

import stretto as st
from stretto.kernels.engine.hopper.tile_config import BLOCKS_BY_THREE
from stretto.kernels.fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from stretto.kernels.xla.quantisation import dequantise

CONFIGS = {
    "all_gather_matmul": all_gather_matmul.Config(pull_slots=3),
    "matmul_reduce_scatter": matmul_reduce_scatter.Config(),
    "matmul_all_reduce": matmul_all_reduce.Config(),
}
KINDS = ("tensor", "row", "block")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_rounded_in_the_program_that_reads_them(kind, tally) -> None:
    """By one program that quantises and dequantises, and by two."""
    x = jax.random.normal(jax.random.key(0), (256, 512))
    found = jax.jit(lambda x: dequantise(*st.quantise(x, kind)))(x)
    want = jax.jit(dequantise)(*jax.jit(lambda x: st.quantise(x, kind))(x))
    tally.checks(1)
    np.testing.assert_array_equal(found, want)
    assert np.any(np.asarray(found) != np.asarray(x))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_are_exact(name, mesh, scale, tally) -> None:
    """Rows that fill no tile; and of k what is no multiple of a block."""
    shape = (36, 100, 36) if scale.rehearsed else (260, 500, 356)
    shape = [mesh.size * size for size in shape]
    wrong = 0
    for kind in KINDS:
        m, k, n = shape
        if kind == "block":  # Blocks are cut where the operand is.
            k, n = (-(-size // (128 * mesh.size)) * 128 * mesh.size for size in (k, n))
        out, want = scaled_cases.run(
            name, kind, mesh.size, (m, k, n), dtypes=(E4M3, E5M2), backend=scale.backend
        )
        wrong += int(np.sum(out != want))
    tally.checks(len(KINDS))
    assert wrong == 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_by_three_warpgroups_are_exact(name, mesh, scale, tally) -> None:
    """Whole numbers; the last tile of each device's rows, or of all, has edges."""
    shape = (100, 128, 128) if scale.rehearsed else (1100, 512, 384)
    shape = [mesh.size * size for size in shape]
    config = dataclasses.replace(CONFIGS[name], tiles=BLOCKS_BY_THREE)
    out, want = scaled_cases.run(
        name, "block", mesh.size, shape, backend=scale.backend, config=config
    )
    tally.checks(1)
    np.testing.assert_array_equal(out, want)


@pytest.mark.gpu(2)
def test_columns_are_gathered_exactly(mesh, scale, tally) -> None:
    """`gather_axis="n"`, of whole numbers with scales of rows and columns."""
    m, k, n = (40, 256, 72) if scale.rehearsed else (520, 1000, 712)
    m, n = m * mesh.size, n * mesh.size
    lhs, rhs = cases.whole_numbers(0, m, k), cases.whole_numbers(1, n, k)
    of_lhs, of_rhs = scaled_cases.scales("row", m, k, n)

    def call(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, out_dtype=F32, backend=scale.backend)
        return st.all_gather_matmul(x, y, "x", gather_axis="n", rhs_transposed=True, **given)

    rows = P("x")
    program = jax.shard_map(call, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
    values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E5M2)
    out = jax.jit(program)(*values, jnp.asarray(of_lhs, F32), jnp.asarray(of_rhs, F32))
    tally.checks(1)
    np.testing.assert_array_equal(out, scaled_cases.exact(lhs, rhs, of_lhs, of_rhs))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["row", "block"])
def test_errors_are_at_most_a_tenth_above_those_of_xla(kind, mesh, scale, tally) -> None:
    """Beside float32's product of the same values and scales."""
    m, k, n = (64, 256, 512) if scale.rehearsed else (1024, 4096, 1024)
    in_specs, _ = scaled_cases.specs("all_gather_matmul", kind)
    x, w = (jax.random.normal(jax.random.key(i), (rows, k)) for i, rows in enumerate((m, n)))
    of_weight = dict(block_scaling_dim=2) if kind == "block" else {}
    (x, of_x), (w, of_w) = st.quantise(x, kind), st.quantise(w, kind, **of_weight)
    want = jnp.matmul(dequantise(x, of_x), dequantise(w, of_w).T, precision="highest")
    operands = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, w, of_x, of_w), in_specs, strict=True)
    ]

    def error(backend: str) -> float:
        call = scaled_cases.mapped("all_gather_matmul", kind, mesh, backend=backend, out_dtype=F32)
        out = jnp.asarray(np.asarray(jax.jit(call)(*operands)))
        return float(jnp.linalg.norm(out - want) / jnp.linalg.norm(want))

    ours, theirs = error(scale.backend), error("xla")
    tally.checks(1)
    # Below the rounding of bfloat16's products both are as good as float32.
    assert ours <= max(1.1 * theirs, 2e-3), (ours, theirs)
