"""Kernels beside XLA's own collectives, which need multiprocessors, too: nobody waits for ever."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import settings
from stretto.kernels.collectives import dispatch

ROUNDS = 6
EXPERTS = 64
# XLA then starts a collective before a kernel, and waits for it after the kernel.
ASYNCHRONOUS = {"xla_gpu_enable_latency_hiding_scheduler": True}
KERNELS = {
    "dispatch": lambda x, w, index, backend: st.expert_dispatch(
        x,
        index,
        "x",
        num_experts=EXPERTS,
        config=dispatch.Config(counted=True, tables=True),
        backend=backend,
    )[0],
    "reduce-scatter": lambda x, w, index, backend: st.matmul_reduce_scatter(
        x, w, "x", backend=backend
    ),
    "all-reduce": lambda x, w, index, backend: st.matmul_all_reduce(x, w, "x", backend=backend),
    "all-gather": lambda x, w, index, backend: st.all_gather_matmul(x, w, "x", backend=backend),
}


def beside(kernel, backend, x, w, index):
    """Sums of what the kernel and XLA's all-gathers give, each time with another device late."""
    total, late = jnp.float32(0), w[:, : w.shape[0]]
    for i in range(ROUNDS):
        is_late = lax.axis_index("x") == i % lax.axis_size("x")
        late = lax.cond(is_late, lambda late: late @ late * jnp.bfloat16(1e-3), lambda x: x, late)
        x, late = lax.optimization_barrier((x, late))
        gathered = lax.all_gather(x + i, "x")
        out = kernel(x, w, index, backend)
        total += gathered[-1, 0, 0].astype(jnp.float32) + out[0, 0].astype(jnp.float32)
        x += (0 * total).astype(x.dtype)
    return total[None]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", KERNELS)
def test_neither_waits_for_ever(name, mesh, rehearsing, scale) -> None:
    size = mesh.size
    rows, d = (32 * size, 64) if rehearsing else (1024 * size, 2048)
    rng = np.random.default_rng(0)

    def given(values):
        values = np.concatenate([values] * size)
        sharding = NamedSharding(mesh, P("x"))
        return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])

    x, w = (rng.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in ((rows, d), (d, 3 * d)))
    index = rng.integers(0, EXPERTS, (rows, 4)).astype(np.int32)
    operands = given(x), given(w), given(index)
    mapped = jax.shard_map(
        functools.partial(beside, KERNELS[name], scale.backend),
        mesh=mesh,
        in_specs=(P("x"),) * 3,
        out_specs=P("x"),
        check_vma=False,
    )
    with settings.wait_limit(20.0):
        options = {} if rehearsing else ASYNCHRONOUS
        program = jax.jit(mapped).lower(*operands).compile(compiler_options=options)
    first = None
    for _ in range(1 if rehearsing else 40):
        out = [program(*operands) for _ in range(1 if rehearsing else 8)][-1]
        found = np.asarray(out.addressable_shards[0].data)
        first = found if first is None else first
        assert np.array_equal(found, first)
