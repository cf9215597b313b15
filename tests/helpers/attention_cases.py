"""Attention over split sequences beside dense attention in float64, and a stand-in for cuDNN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.private_jax import cudnn_attention
from stretto.kernels.attention import blockwise, cudnn
from stretto.kernels.attention.masks import Mask, Tokens

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8


# It runs once; optimised, it would compile longer than it runs.
QUICKLY = {"xla_backend_optimization_level": 0}


def drawn(kv_tokens=TOKENS, size=1.0, kv_heads=KV_HEADS):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(BATCH, TOKENS, HEADS, DIM)) * size
    k, v = rng.normal(size=(2, BATCH, kv_tokens, kv_heads, DIM))
    bar = rng.normal(size=q.shape)
    return [x.astype(np.float32) for x in (q, k, v, bar)]


def dense(operands, seen):
    """Result, logsumexp `[batch, tokens, heads]` and derivatives, of `seen` [batch, q, k]."""
    q, k, v, bar = (np.asarray(x, np.float64) for x in operands)
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, group, 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, wide_k) * q.shape[-1] ** -0.5
    scores = np.where(seen[:, None], scores, -np.inf)
    base = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(base), 0, base))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (base + np.log(total))[..., 0].transpose(0, 2, 1)
    weights = weights / np.where(total == 0, 1, total)
    out = np.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    weights_bar = np.einsum("bqhd,bkhd->bhqk", bar, wide_v)
    scores_bar = weights * (weights_bar - (weights * weights_bar).sum(-1, keepdims=True))
    scores_bar *= q.shape[-1] ** -0.5
    k_bar = np.einsum("bhqk,bqhd->bkhd", scores_bar, q)
    v_bar = np.einsum("bhqk,bqhd->bkhd", weights, bar)
    shape = (*k.shape[:3], group, k.shape[3])
    k_bar, v_bar = (x.reshape(shape).sum(3) for x in (k_bar, v_bar))
    return out, lse, np.einsum("bhqk,bkhd->bqhd", scores_bar, wide_k), k_bar, v_bar


def ours(devices, operands, layout="contiguous", segments=None, logsumexp=True, **options):
    q, k, v, bar = operands
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("cp",))
    place = (lambda x: st.to_zigzag(x, devices)) if layout == "zigzag" else (lambda x: x)
    back = (lambda x: st.from_zigzag(x, devices)) if layout == "zigzag" else (lambda x: x)
    segments = [] if segments is None else [place(jnp.asarray(x)) for x in segments]

    def local(q, k, v, bar, *ids):
        named = dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=False))

        def call(q, k, v):
            return st.context_parallel_attention(
                q, k, v, "cp", layout=layout, return_logsumexp=logsumexp, **named, **options
            )

        if not logsumexp:
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(bar)
        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((bar, jnp.zeros_like(lse)))

    spec = P(None, "cp")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    mapped = jax.jit(mapped, compiler_options=QUICKLY)
    return [np.asarray(back(x)) for x in mapped(*map(place, (q, k, v, bar)), *segments)]


def check(found, right):
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def places(kv_tokens=TOKENS):
    return np.arange(TOKENS)[:, None] - np.arange(kv_tokens)[None]


def known(q, k, keys):
    """What the mask of a stand-in for cuDNN has to know of a call's queries and keys."""
    places = jnp.arange(k.shape[1])
    if keys is not None and keys.ndim:  # a number for each sequence of the batch
        seen = jnp.where(places < keys[:, None], 0, -1)
        return Tokens(jnp.arange(q.shape[1]), jnp.zeros(q.shape[:2], jnp.int32)), Tokens(
            places, seen
        )
    return Tokens(jnp.arange(q.shape[1])), Tokens(
        places if keys is None else jnp.where(places < keys, places, -1)
    )


def stand_in_forward(q, k, v, *, scale, causal=False, window=None, keys=None):
    mask = Mask(causal=causal, window=window)
    return blockwise.forward(q, k, v, *known(q, k, keys), mask=mask, scale=scale)


def stand_in_backward(q, k, v, out, lse, bar, *, scale, causal=False, window=None, keys=None):
    mask, tokens = Mask(causal=causal, window=window), known(q, k, keys)
    return blockwise.backward(q, k, v, out, lse, bar, None, *tokens, mask=mask, scale=scale)


def stand_in(monkeypatch):
    """What cuDNN would serve is served by `jax.lax`, with cuDNN's few masks."""
    monkeypatch.setattr(cudnn, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(cudnn_attention, "forward", stand_in_forward)
    monkeypatch.setattr(cudnn_attention, "backward", stand_in_backward)
