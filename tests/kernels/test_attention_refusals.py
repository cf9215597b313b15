"""What attention over split sequences refuses, with the way out in the message."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from attention_kernel_cases import SMALL, drawn
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.private_jax import cudnn_attention
from stretto.kernels.collectives import exchange
from stretto.kernels.fused import all_gather_matmul
from stretto.kernels.fused.attention_config import Config
from stretto.kernels.operations.attention_options import Config as Gathering

TWICE = "has no second derivative; cast q, k and v to float32 and pass method='gather'"


def gradient_of_gradient(loss):
    return jax.grad(lambda q: jnp.square(jax.grad(loss)(q).astype(jnp.float32)).sum())


def derivative_of_gradient(loss):
    return lambda q: jax.jvp(jax.grad(loss), (q,), (q,))[1]


def gradient_of_derivative(loss):
    return jax.grad(lambda q: jax.jvp(loss, (q,), (q,))[1])


@pytest.mark.parametrize(
    "twice", [gradient_of_gradient, derivative_of_gradient, gradient_of_derivative]
)
def test_second_derivatives_of_the_kernel(twice):
    q, k, v, _ = drawn((1, 256, 2, 64), (1, 256, 1, 64))

    def body(q, k, v, **how):
        def loss(q):
            found = st.context_parallel_attention(q, k, v, "x", causal=True, **how)
            return found.astype(jnp.float32).sum()

        return twice(loss)(q)

    def shape_of(dtype="bfloat16", **how):
        spec = P(None, "x")
        mapped = jax.shard_map(
            lambda *given: body(*given, **how), mesh=mesh_of(2), in_specs=spec, out_specs=spec
        )
        return jax.eval_shape(mapped, *(x.astype(dtype) for x in (q, k, v)))

    with st.simulate():
        with pytest.raises(NotImplementedError, match=re.escape(TWICE)):
            shape_of(method="fused", config=SMALL)
        assert shape_of(method="gather", dtype="float32").shape == q.shape


@pytest.mark.parametrize("keys", [None, 3])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_derivatives_of_cudnns_attention(which, keys):
    """The rules of derivatives call it: its own derivative would be a second one."""
    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    lse = jnp.zeros((1, 2, 8))
    call = getattr(cudnn_attention, which)
    others = (q, lse, q) if which == "backward" else ()
    many = None if keys is None else jnp.asarray(keys)
    with pytest.raises(NotImplementedError, match=re.escape(TWICE)):
        jax.jvp(lambda q: call(q, q, q, *others, scale=1.0, keys=many)[0], (q,), (q,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (dict(config=Config(keep=None)), "attention_config.Config: keep=None is of type NoneType"),
        (dict(config=Config(keep=1)), "keep=1 is of type int; it must be of type bool"),
        (dict(config=Config(pull_slots=True)), "pull_slots=True is of type bool; it must be of"),
        (dict(config=Config(tiles=None)), "tiles=None is of type NoneType; it must be of type str"),
        (dict(config=Gathering(by_peer=None)), "by_peer=None is of type NoneType"),
        (dict(causal=None), "causal=None is of type NoneType; it must be True or False"),
        (dict(causal=1), "causal=1 is of type int; it must be True or False"),
        (dict(return_logsumexp=None), "return_logsumexp=None is of type NoneType"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_flags_are_true_or_false(call, words, backend):
    q = jax.ShapeDtypeStruct((1, 512, 2, 64), "bfloat16")
    spec = P(None, "x")
    mapped = jax.shard_map(
        lambda q: st.context_parallel_attention(q, q, q, "x", backend=backend, **call),
        mesh=mesh_of(2),
        in_specs=spec,
        out_specs=spec,
    )
    with st.simulate(), pytest.raises(ValueError, match=re.escape(words)):
        jax.eval_shape(mapped, q)


def test_flags_and_numbers_of_other_operations():
    """One check serves all configurations."""
    x, spec = jax.ShapeDtypeStruct((64, 64), "bfloat16"), P("x")

    def refused(call, words):
        mapped = jax.shard_map(call, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
        with pytest.raises(ValueError, match=re.escape(words)):
            jax.eval_shape(mapped, x)

    unfused = all_gather_matmul.Config(unfused=None)
    slots = exchange.Config(slots=True)
    refused(lambda x: st.all_gather_matmul(x, x.T, "x", config=unfused), "unfused=None is of type")
    refused(lambda x: st.all_gather(x, "x", config=slots), "slots=True is of type bool")
    refused(lambda x: st.all_gather(x, "x", tiled=None), "tiled=None is of type NoneType")
