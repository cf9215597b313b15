"""`context_parallel_attention` beside dense attention over the whole sequence, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from attention_cases import (
    BATCH,
    KV_HEADS,
    QUICKLY,
    TOKENS,
    check,
    dense,
    drawn,
    ours,
    places,
    stand_in,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.private_jax import cudnn_attention
from stretto.kernels.attention import cudnn
from stretto.kernels.attention.masks import Mask
from stretto.kernels.attention.shares import Share, counted, merged
from stretto.kernels.operations import attention_by_peer as by_peer
from stretto.kernels.operations.attention_options import Config

WAYS = {
    "together": dict(method="gather"),
    "by peer": dict(backend="simulator", config=Config()),
    "heads": dict(method="heads"),
}


@pytest.mark.parametrize(
    ("layout", "window"),
    [("contiguous", None), slow("contiguous", 5), slow("zigzag", None), ("zigzag", 5)],
)
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


def documents():
    """(documents of queries, of keys, what is seen under a causal mask)."""
    ids = np.repeat([[0, 0, 1, 2], [3, 3, 3, 4]], TOKENS // 4, 1).astype(np.int32)
    others = np.where(ids == 4, 7, ids)
    return ids, others, (ids[:, :, None] == others[:, None]) & (places() >= 0)


@pytest.mark.parametrize("way", ["by peer", slow("heads")])
def test_documents_in_other_ways(way):
    operands, (ids, others, seen) = drawn(), documents()
    how = dict(layout="zigzag", segments=(ids, others), causal=True, **WAYS[way])
    check(ours(2, operands, **how), dense(operands, seen))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by peer", "heads"])
def test_windows_in_other_ways(way):
    """By heads of more devices than heads of keys, which are then sent twice."""
    operands, d = drawn(), places()
    seen = np.broadcast_to((d >= 0) & (d < 5), (BATCH, TOKENS, TOKENS))
    devices = 2 * KV_HEADS if way == "heads" else 3
    found = ours(devices, operands, layout="zigzag", causal=True, window=5, **WAYS[way])
    check(found, dense(operands, seen))


@pytest.mark.parametrize("way", [pytest.param("by peer", marks=pytest.mark.slow), "heads"])
def test_other_lengths_in_other_ways(way):
    operands = drawn(kv_tokens=10)
    seen = np.ones((BATCH, TOKENS, 10), bool)
    check(ours(2, operands, **WAYS[way]), dense(operands, seen))


def test_collectives_of_ours_move_keys_and_heads():
    """In the simulator, which knows what is read before it has come."""
    operands = drawn()
    seen = np.broadcast_to(places() >= 0, (BATCH, TOKENS, TOKENS))
    for how in (dict(config=Config(by_peer=False)), dict(method="heads")):
        found = ours(2, operands, layout="zigzag", causal=True, backend="simulator", **how)
        check(found, dense(operands, seen))


@pytest.mark.parametrize("bug", ["keys of the wrong peer", "derivatives to the wrong owner"])
def test_bugs_are_found(monkeypatch, bug):
    """By three devices: of two, every peer is the right one."""
    right = by_peer.shifted

    def wrong(x, axes, distance):
        is_key = distance < 0
        turned = is_key == (bug == "keys of the wrong peer")
        return right(x, axes, -distance if turned else distance)

    monkeypatch.setattr(by_peer, "shifted", wrong)
    operands = drawn()
    seen = np.broadcast_to(places() >= 0, (BATCH, TOKENS, TOKENS))
    found = ours(3, operands, layout="zigzag", causal=True, **WAYS["by peer"])
    with pytest.raises(AssertionError):
        check(found, dense(operands, seen))


@pytest.mark.parametrize("way", ["together", slow("heads")])
def test_forward_mode(way):
    """The directional derivative is that of the cotangents, which other tests hold right."""
    q, k, v, bar = (jnp.asarray(x) for x in drawn())
    dots = [jnp.asarray(x) for x in drawn(size=0.5)[:3]]
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("cp",))

    def local(q, k, v, bar, *dots):
        def call(q, k, v):
            return st.context_parallel_attention(q, k, v, "cp", causal=True, **WAYS[way])

        _, dot = jax.jvp(call, (q, k, v), dots)
        bars = jax.vjp(call, q, k, v)[1](bar)
        of_bars = sum(jnp.vdot(x, y) for x, y in zip(bars, dots, strict=True))
        return jax.lax.psum(jnp.vdot(dot, bar), "cp"), jax.lax.psum(of_bars, "cp")

    spec = P(None, "cp")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())
    forwards, backwards = jax.jit(mapped, compiler_options=QUICKLY)(q, k, v, bar, *dots)
    assert float(forwards) == pytest.approx(float(backwards), rel=1e-4)


def test_shares_without_keys_count_nothing():
    """Whatever numbers they hold, and where all are such."""
    some = Share(jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 1, 2)))
    none = counted(Share(jnp.full((1, 2, 1, 4), jnp.nan), jnp.zeros((1, 1, 2))), jnp.asarray(0))
    found = merged([some, none], jnp.float32)
    assert (found.out == 1).all() and (found.lse == 0).all()
    found = merged([none, none], jnp.float32)
    assert (found.out == 0).all() and jnp.isneginf(found.lse).all()


@pytest.mark.parametrize("way", WAYS)
def test_nan_is_not_hidden(way):
    """That of a query is in its row of the result, of the logsumexp and of the derivative."""
    q, *others = drawn()
    q[0, 5] = np.nan
    out, lse, q_bar, *_ = ours(2, [q, *others], causal=True, **WAYS[way])
    for found in (out[0, :, 0, 0], lse[0, :, 0], q_bar[0, :, 0, 0]):
        assert (np.isnan(found) == (np.arange(TOKENS) == 5)).all()


def test_a_window_of_more_keys_than_there_are():
    """Also of more than 32 bits can count."""
    operands = drawn()
    seen = np.broadcast_to(places() >= 0, (BATCH, TOKENS, TOKENS))
    check(ours(2, operands, causal=True, window=2**40), dense(operands, seen))


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


@pytest.mark.parametrize(
    ("way", "devices", "layout", "causal"),
    [
        slow("together", 3, "zigzag", True),
        slow("together", 2, "contiguous", True),
        slow("together", 2, "zigzag", False),
        slow("together", 1, "zigzag", True),
        ("by peer", 3, "zigzag", True),
        slow("by peer", 2, "contiguous", True),
        slow("by peer", 2, "zigzag", False),
        ("heads", 2, "zigzag", True),
    ],
)
def test_parts_that_cudnn_is_given(monkeypatch, way, devices, layout, causal):
    """Diagonals, prefixes of a length known at run time, and how they are merged."""
    stand_in(monkeypatch)
    operands = drawn()
    seen = np.broadcast_to((places() >= 0) | (not causal), (BATCH, TOKENS, TOKENS))
    how = WAYS[way]
    found = ours(devices, operands, layout=layout, causal=causal, logsumexp=False, **how)
    out, _, *bars = dense(operands, seen)
    check(found, [out, *bars])


@pytest.mark.parametrize(
    ("layout", "rectangles"), [("zigzag", [(12, 6), (6, 12)]), slow("contiguous", [(12, 12)])]
)
def test_a_peers_keys_are_one_call_without_a_mask(monkeypatch, layout, rectangles):
    """(Queries, keys) of a peer before this device, and of one behind it."""
    stand_in(monkeypatch)
    calls, forward = [], cudnn_attention.forward

    def noted(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1], options.get("causal", False)))
        return forward(q, k, v, **options)

    monkeypatch.setattr(cudnn_attention, "forward", noted)
    operands = drawn()
    seen = np.broadcast_to(places() >= 0, (BATCH, TOKENS, TOKENS))
    found = ours(2, operands, layout=layout, causal=True, logsumexp=False, **WAYS["by peer"])
    out, _, *bars = dense(operands, seen)
    check(found, [out, *bars])
    expected = [(12, 12, True), *((*sizes, False) for sizes in rectangles)]
    assert calls[: len(expected)] == expected


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
    """The second block has its output below it; a sentence says that of the first."""
    namespace = {"__name__": "page"}
    first, second = pages.blocks(pages.DOCS / "models" / "attention.md")
    for code, wanted in ((first.code, "True\n"), second):
        exec(compile(code, "attention.md", "exec"), namespace)
        assert capsys.readouterr().out == wanted
