"""`context_parallel_attention` beside dense attention over the whole sequence, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8


def drawn(kv_tokens=TOKENS, size=1.0):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(BATCH, TOKENS, HEADS, DIM)) * size
    k, v = rng.normal(size=(2, BATCH, kv_tokens, KV_HEADS, DIM))
    bar = rng.normal(size=q.shape)
    return [x.astype(np.float32) for x in (q, k, v, bar)]


def dense(q, k, v, bar, seen):
    """Result, logsumexp `[batch, tokens, heads]` and derivatives, of `seen` [batch, q, k]."""
    q, k, v, bar = (np.asarray(x, np.float64) for x in (q, k, v, bar))
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


def ours(devices, q, k, v, bar, layout="contiguous", segments=None, **options):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("cp",))
    place = (lambda x: st.to_zigzag(x, devices)) if layout == "zigzag" else (lambda x: x)
    back = (lambda x: st.from_zigzag(x, devices)) if layout == "zigzag" else (lambda x: x)
    segments = [] if segments is None else [place(jnp.asarray(x)) for x in segments]

    def local(q, k, v, bar, *ids):
        named = dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=False))

        def call(q, k, v):
            return st.context_parallel_attention(
                q, k, v, "cp", layout=layout, return_logsumexp=True, **named, **options
            )

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((bar, jnp.zeros_like(lse)))

    spec = P(None, "cp")
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    return [np.asarray(back(x)) for x in mapped(*map(place, (q, k, v, bar)), *segments)]


def check(found, right):
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def places(kv_tokens=TOKENS):
    return np.arange(TOKENS)[:, None] - np.arange(kv_tokens)[None]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [None, 5])
def test_causal(layout, window):
    operands, d = drawn(), places()
    seen = np.broadcast_to((d >= 0) & (d < (window or TOKENS)), (BATCH, TOKENS, TOKENS))
    check(ours(2, *operands, layout=layout, causal=True, window=window), dense(*operands, seen))


def test_documents_and_rows_without_keys():
    operands = drawn()
    ids = np.repeat([[0, 0, 1, 2], [3, 3, 3, 4]], TOKENS // 4, 1).astype(np.int32)
    others = np.where(ids == 4, 7, ids)  # Document 4 has no keys.
    seen = (ids[:, :, None] == others[:, None]) & (places() >= 0)
    found = ours(2, *operands, layout="zigzag", segments=(ids, others), causal=True)
    assert np.isneginf(found[1][1, -1]).all() and not found[2][1, -1].any()
    check(found, dense(*operands, seen))


def test_other_length_of_keys_and_large_scores():
    operands = drawn(kv_tokens=10, size=1e3)
    seen = np.ones((BATCH, TOKENS, 10), bool)
    for x, y in zip(ours(2, *operands), dense(*operands, seen), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3 * np.abs(y).max())


def test_zigzag_is_undone_and_positions_follow_it():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("cp",))
    order = st.to_zigzag(jnp.arange(8), 2, axis=0)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert st.from_zigzag(order, 2, axis=0).tolist() == list(range(8))
    found = jax.shard_map(
        lambda: st.token_positions(4, "cp", layout="zigzag"),
        mesh=mesh, in_specs=(), out_specs=P("cp"),
    )()  # fmt: skip
    assert found.tolist() == order.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layout="striped"), "layout='striped' is not one of"),
        (dict(window=3), "window=3 must be at least 1, and needs causal=True"),
        (dict(segments=[np.zeros((BATCH, 4), np.int32)] * 2), "segment_ids is int32"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        ours(2, *drawn(), **options)


def test_zigzag_refuses_what_it_cannot_cut():
    with pytest.raises(ValueError, match="must be a multiple of 4, two chunks"):
        st.to_zigzag(jnp.zeros((1, 6)), 2)
