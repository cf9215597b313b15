"""Operands in 8 bits with scales, on GPUs: exact on whole numbers, and as good as XLA on others."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import F32
from jax.sharding import NamedSharding
from scaled_cases import E4M3, E5M2, NAMES

import stretto as st
from stretto.kernels.xla.quantisation import dequantise

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
def test_whole_numbers_are_exact(name, scale, tally) -> None:
    """Rows that fill no tile; of each device 200 of k, which is no multiple of a block."""
    shape = (72, 200, 72) if scale.rehearsed else (520, 1000, 712)
    wrong = 0
    for kind in KINDS:
        m, k, n = shape
        if kind == "block":  # Blocks are cut where the operand is.
            k, n = -(-k // 128) * 128, -(-n // 128) * 128
        out, want = scaled_cases.run(
            name, kind, 2, (m, k, n), dtypes=(E4M3, E5M2), backend=scale.backend
        )
        wrong += int(np.sum(out != want))
    tally.checks(len(KINDS))
    assert wrong == 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["row", "block"])
def test_errors_are_at_most_a_tenth_above_those_of_xla(kind, scale, tally) -> None:
    """Beside float32's product of the same values and scales."""
    m, k, n = (64, 256, 256) if scale.rehearsed else (1024, 4096, 1024)
    mesh = cases.mesh_of(2)
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
