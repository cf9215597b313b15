"""cuDNN's attention as a process per GPU needs it: its operands and results are copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from stretto.distributed.private_jax import cudnn_attention

QUERIES = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
LOGSUMEXP = jax.ShapeDtypeStruct((1, 4, 64), jnp.float32)


@pytest.fixture
def traced(monkeypatch):
    """The machine needs no cuDNN to trace."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda *_: True)
    if (why := cudnn_attention.obstacle.__wrapped__()) is not None:
        pytest.skip(why)


@pytest.fixture
def copied(traced, monkeypatch):
    """The shapes of arrays that have been copied."""
    found = []

    def own(x):
        found.append(x.shape)
        return x

    monkeypatch.setattr(cudnn_attention, "in_own_memory", own)
    return found


def test_second_derivatives_of_copies_are_an_error(traced, monkeypatch):
    """A copy by bits has no derivative: JAX would take it for zero."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    mesh = jax.make_mesh((1,), ("x",))

    def attend(q):
        return cudnn_attention.forward(q, q, q, scale=1.0)[0]

    def derived(q):
        return jax.jvp(attend, (q,), (q,))[1]

    program = jax.shard_map(derived, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.eval_shape(program, QUERIES)


def test_what_the_forward_pass_reads_and_makes(copied):
    def attend(q, k, v):
        return cudnn_attention.forward(q, k, v, scale=1.0)

    out, lse = jax.eval_shape(attend, QUERIES, QUERIES, QUERIES)
    assert copied == [*[QUERIES.shape] * 3, out.shape, lse.shape]


def test_what_the_derivative_reads_and_makes(copied):
    def derive(q, lse):
        return cudnn_attention.backward(q, q, q, q, lse, q, scale=1.0)

    found = jax.eval_shape(derive, QUERIES, LOGSUMEXP)
    assert copied[-3:] == [x.shape for x in found]
    assert copied[:-3].count(QUERIES.shape) == 5 and copied[:-3].count(LOGSUMEXP.shape) == 1
