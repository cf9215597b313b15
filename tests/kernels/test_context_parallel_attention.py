"""`context_parallel_attention` beside dense attention over the whole sequence, in float64."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.private_jax import cudnn_attention
from stretto.kernels.attention import blockwise, cudnn
from stretto.kernels.attention.masks import Mask, Tokens

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8


def drawn(kv_tokens=TOKENS, size=1.0):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(BATCH, TOKENS, HEADS, DIM)) * size
    k, v = rng.normal(size=(2, BATCH, kv_tokens, KV_HEADS, DIM))
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
    check(ours(2, operands, layout=layout, causal=True, window=window), dense(operands, seen))


def test_documents_and_rows_without_keys():
    operands = drawn()
    ids = np.repeat([[0, 0, 1, 2], [3, 3, 3, 4]], TOKENS // 4, 1).astype(np.int32)
    others = np.where(ids == 4, 7, ids)  # Document 4 has no keys.
    seen = (ids[:, :, None] == others[:, None]) & (places() >= 0)
    found = ours(2, operands, layout="zigzag", segments=(ids, others), causal=True)
    assert np.isneginf(found[1][1, -1]).all() and not found[2][1, -1].any()
    check(found, dense(operands, seen))


def test_other_length_of_keys_and_large_scores():
    operands = drawn(kv_tokens=10, size=1e3)
    seen = np.ones((BATCH, TOKENS, 10), bool)
    for x, y in zip(ours(2, operands), dense(operands, seen), strict=True):
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
        ours(2, drawn(), **options)


def test_zigzag_refuses_what_it_cannot_cut():
    with pytest.raises(ValueError, match="must be a multiple of 4, two chunks"):
        st.to_zigzag(jnp.zeros((1, 6)), 2)


def known(q, k, keys):
    """What the mask of a stand-in for cuDNN has to know of a call's queries and keys."""
    places = jnp.arange(k.shape[1])
    return Tokens(jnp.arange(q.shape[1])), Tokens(
        places if keys is None else jnp.where(places < keys, places, -1)
    )


def stand_in_forward(q, k, v, *, scale, causal=False, window=None, keys=None):
    mask = Mask(causal=causal, window=window)
    return blockwise.forward(q, k, v, *known(q, k, keys), mask=mask, scale=scale)


def stand_in_backward(q, k, v, out, lse, bar, *, scale, causal=False, window=None, keys=None):
    mask, tokens = Mask(causal=causal, window=window), known(q, k, keys)
    return blockwise.backward(q, k, v, out, lse, bar, None, *tokens, mask=mask, scale=scale)


@pytest.mark.parametrize(
    ("devices", "layout", "causal"),
    [(3, "zigzag", True), (2, "contiguous", True), (2, "zigzag", False), (1, "zigzag", True)],
)
def test_parts_that_cudnn_is_given(monkeypatch, devices, layout, causal):
    """Diagonals, prefixes of a length known at run time, and how they are merged."""
    monkeypatch.setattr(cudnn, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(cudnn_attention, "forward", stand_in_forward)
    monkeypatch.setattr(cudnn_attention, "backward", stand_in_backward)
    operands = drawn()
    seen = np.broadcast_to((places() >= 0) | (not causal), (BATCH, TOKENS, TOKENS))
    found = ours(devices, operands, layout=layout, causal=causal, logsumexp=False)
    out, _, *bars = dense(operands, seen)
    check(found, [out, *bars])


@pytest.mark.parametrize(
    ("type_", "dim", "segments", "window"),
    [
        ("float32", 64, False, None),
        ("bfloat16", 260, False, None),
        ("bfloat16", 64, True, None),
        ("bfloat16", 64, False, 3),
    ],
)
def test_what_cudnn_is_not_given(monkeypatch, type_, dim, segments, window):
    monkeypatch.setattr(cudnn, "_is_here", lambda: True)
    monkeypatch.setattr(cudnn.Machine, "of_mesh", lambda: cudnn.Machine.of_kind("gpu", "H200"))
    monkeypatch.setattr(cudnn_attention, "obstacle", lambda: None)
    served = jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    assert cudnn.obstacle(served, Mask(causal=True), segments=False, devices=2) is None
    mask, q = Mask(causal=True, window=window), jax.ShapeDtypeStruct((1, 8, 2, dim), type_)
    assert cudnn.obstacle(q, mask, segments=segments, devices=2)


def test_this_version_of_jax_has_the_private_functions():
    reason = cudnn_attention.obstacle()
    assert reason is None or "cuDNN was not found" in reason


def test_code_of_the_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "models" / "attention.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "attention.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "True\n"
