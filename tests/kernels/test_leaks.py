"""What derivatives keep of a trace, as `jax.checking_leaks` finds it: nothing that outlives it.

The calls are XLA's: JAX finds tracers in every kernel that calls `pl.run_scoped` (0.11.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st

DRAW = np.random.default_rng(0)
MATRIX = DRAW.standard_normal((16, 16), np.float32)
GROUPS, SIZES = DRAW.standard_normal((2, 16, 16), np.float32), np.array([3, 5], np.int32)
INDEX = DRAW.integers(0, 4, (8, 2), np.int32)
WEIGHTS = DRAW.random((8, 2), np.float32)


def dispatched_and_combined(x):
    rows, routing = st.expert_dispatch(x, INDEX, "x", num_experts=4)
    return st.expert_combine(rows, WEIGHTS, routing.positions, "x")


def attended(x):
    heads = x[None, :, None]
    return st.context_parallel_attention(heads, heads, heads, "x")


ONCE = ("fp8 groups", "fp8 mixture")
"""Calls whose derivatives have none themselves."""

CALLS = {
    "all_gather_matmul": lambda x: st.all_gather_matmul(x, MATRIX, "x", epilogue=jax.nn.relu),
    "matmul_reduce_scatter": lambda x: st.matmul_reduce_scatter(x, MATRIX, "x"),
    "matmul_all_reduce": lambda x: st.matmul_all_reduce(x, MATRIX, "x"),
    "grouped_matmul": lambda x: st.grouped_matmul(x, GROUPS, SIZES),
    "experts": dispatched_and_combined,
    "mixture_of_experts": lambda x: st.mixture_of_experts(
        x, INDEX, WEIGHTS, GROUPS, GROUPS, "x", activation=jax.nn.relu
    )[0],
    "all_reduce_rms_norm": lambda x: st.all_reduce_rms_norm(x, x, MATRIX[0], "x")[1],
    "attention": attended,
    "collectives": lambda x: st.all_reduce(st.reduce_scatter(st.all_gather(x, "x"), "x"), "x"),
    "fp8": lambda x: st.fp8.matmul(x, MATRIX),
    "fp8 groups": lambda x: st.fp8.grouped_matmul(x, GROUPS, SIZES),
    "fp8 mixture": lambda x: st.fp8.mixture_of_experts(
        x, INDEX, WEIGHTS, GROUPS, GROUPS, "x", activation=jax.nn.relu
    )[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_keep_no_tracers(name):
    def total(x):
        return jnp.sum(CALLS[name](x).astype(jnp.float32))

    def derivatives(x):
        gradient = jax.vmap(jax.grad(total))(x[None])[0]
        return gradient if name in ONCE else jax.jvp(jax.grad(total), (gradient,), (x,))[1]

    program = jax.shard_map(
        derivatives, mesh=mesh_of(2), in_specs=P(), out_specs=P("x"), check_vma=False
    )
    with jax.checking_leaks():
        jax.make_jaxpr(jax.jit(program))(jnp.ones((8, 16), jnp.float32))
