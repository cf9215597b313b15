"""Calls in programs that forbid implicit promotion of ranks and types."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st

MESH = Mesh(np.array(jax.devices()[:2]), ("tp",))
ROWS, COLUMNS = P("tp"), P(None, "tp")


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape) / 4, jnp.bfloat16)


X, W, BIAS = numbers(32, 32), numbers(32, 32), numbers(32)
EXPERTS = (numbers(4, 32, 32), numbers(4, 16, 32))
SIZES = np.full(4, 4, np.int32)
CHOICES = np.random.default_rng(1).integers(0, 4, (16, 2)).astype(np.int32)
WEIGHTS = numbers(16, 2)


def gelu_of_gather(x, w, b, *, backend):
    return st.all_gather_matmul(x, w, "tp", epilogue=st.epilogues.gelu(b), backend=backend)


def residual_of_sum(x, w, r, *, backend):
    epilogue = st.epilogues.residual(r)
    return st.matmul_reduce_scatter(x, w, "tp", epilogue=epilogue, backend=backend)


def norm(x, r, w, *, backend):
    return st.all_reduce_rms_norm(x, r, w, "tp", backend=backend)


def experts(x, weights, w_in, w_out, index, *, backend):
    return st.mixture_of_experts(x, index, weights, w_in, w_out, "tp", backend=backend)[0]


def fp8_experts(x, weights, w_in, w_out, index, *, backend):
    return st.fp8.mixture_of_experts(x, index, weights, w_in, w_out, "tp", backend=backend)[0]


def groups(x, w, *, backend):
    return st.grouped_matmul(x, w, jnp.asarray(SIZES), backend=backend)


def fp8_groups(x, w, *, backend):
    return st.fp8.grouped_matmul(x, w, jnp.asarray(SIZES), backend=backend)


def attention(x, *, backend):
    return st.context_parallel_attention(
        *[x[None, :, None]] * 3, "tp", causal=True, backend=backend
    )


CALLS = {
    "gelu_of_gather": (gelu_of_gather, (X, W, BIAS), (ROWS, COLUMNS, ROWS), COLUMNS),
    "residual_of_sum": (residual_of_sum, (X, W, X), (COLUMNS, ROWS, ROWS), ROWS),
    "norm": (norm, (numbers(64, 32), X, BIAS), (ROWS, P(), P()), P()),
    "experts": (experts, (X[:16], WEIGHTS, *EXPERTS, CHOICES), (ROWS,) * 5, ROWS),
    "fp8_experts": (fp8_experts, (X[:16], WEIGHTS, *EXPERTS, CHOICES), (ROWS,) * 5, ROWS),
    "groups": (groups, (X, EXPERTS[0]), (ROWS, P()), ROWS),
    "fp8_groups": (fp8_groups, (X, EXPERTS[0]), (ROWS, P()), ROWS),
    "attention": (attention, (X,), (ROWS,), COLUMNS),
}
SIMULATED = ["gelu_of_gather", "residual_of_sum", "experts"]


def results(name, backend):
    """The results and the gradient of a call, from programs that are traced anew."""
    jax.clear_caches()
    call, operands, in_specs, out_specs = CALLS[name]
    typed = backend == "auto"
    run = jax.jit(
        jax.shard_map(
            functools.partial(call, backend=backend),
            mesh=MESH,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=typed,
        )
    )

    def loss(*floats):
        outs = jax.tree.leaves(run(*floats, *operands[len(floats) :]))
        return sum(jnp.sum(jnp.square(out.astype(jnp.float32))) for out in outs)

    floats = [x for x in operands if isinstance(x, jax.Array)]
    return jax.value_and_grad(loss, argnums=tuple(range(len(floats))))(*floats)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "auto") for name in CALLS] + [(name, "simulator") for name in SIMULATED],
)
def test_promotions_that_a_program_forbids(name, backend):
    wanted = results(name, backend)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = results(name, backend)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
