"""Attention over split sequences, moved in every way: as near to float32 as cuDNN on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.attention import blockwise
from stretto.kernels.attention.masks import Mask, Tokens
from stretto.kernels.engine.hopper.attention.config import AttentionTiles
from stretto.kernels.engine.hopper.attention.derivative_config import DerivativeTiles
from stretto.kernels.fused import attention, attention_config, attention_derivative
from stretto.kernels.operations.attention_options import Config

WAYS = {
    "by peer": dict(config=Config()),
    "together": dict(config=Config(by_peer=False)),
    "heads": dict(method="heads"),
}
SPEC = P(None, "x")


def drawn(devices: int, tokens: int, dim: int) -> list[jax.Array]:
    """q of large numbers, k, v and a cotangent; half as many heads of keys as of queries."""
    keys = jax.random.split(jax.random.key(dim), 4)
    heads = (2 * devices, devices, devices, 2 * devices)
    q, k, v, bar = (
        jax.random.normal(key, (1, devices * tokens, count, dim))
        for key, count in zip(keys, heads, strict=True)
    )
    return [x.astype(jnp.bfloat16) for x in (10 * q, k, v, bar)]


def exact(
    operands: list[jax.Array], causal: bool, ids: jax.Array | None = None
) -> list[np.ndarray]:
    """The result and its derivatives, in float32; `ids` are those of documents."""
    q, k, v, bar = (x.astype(jnp.float32) for x in operands)
    tokens = Tokens(jnp.arange(q.shape[1]), ids)
    how = dict(mask=Mask(causal=causal), scale=q.shape[-1] ** -0.5)

    @jax.jit
    def program(q, k, v, bar):
        out, lse = blockwise.forward(q, k, v, tokens, tokens, **how)
        bars = blockwise.backward(q, k, v, out, lse, bar, None, tokens, tokens, **how)
        return out, *bars

    return [np.asarray(x) for x in program(q, k, v, bar)]


def errors(found: list[jax.Array], right: list[np.ndarray]) -> np.ndarray:
    wide = [np.asarray(x.astype(jnp.float32)) for x in found]
    return np.array(
        [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(wide, right, strict=True)]
    )


def prepared(operands, mesh, right, *, causal: bool, layout: str, ids: jax.Array | None = None):
    """A function of further arguments: errors of the result and of its derivatives."""
    is_cut = layout == "zigzag"
    where = NamedSharding(mesh, SPEC)
    everything = operands if ids is None else [*operands, ids]
    given = [jax.device_put(st.to_zigzag(x, mesh.size) if is_cut else x, where) for x in everything]

    def by(**options):
        def local(q, k, v, bar, ids=None):
            def call(q, k, v):
                return st.context_parallel_attention(
                    q, k, v, "x", causal=causal, layout=layout, segment_ids=ids, **options
                )

            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(bar)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)
        found = jax.jit(mapped)(*given)
        return errors([st.from_zigzag(x, mesh.size) if is_cut else x for x in found], right)

    return by


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_way(dim, causal, layout, mesh, scale, tally) -> None:
    operands = drawn(mesh.size, 8 if scale.rehearsed else 512, dim)
    right = exact(operands, causal)
    by = prepared(operands, mesh, right, causal=causal, layout=layout)
    plain = by(backend="xla")
    for way, options in WAYS.items():
        found = by(backend=scale.backend, **options)
        tally.checks(1)
        assert (found <= 1.5 * plain + 1e-3).all(), (way, found, plain)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_that_pulls_keys(dim, causal, layout, mesh, scale, tally) -> None:
    operands = drawn(mesh.size, 256 if scale.rehearsed else 1024, dim)
    right = exact(operands, causal)
    by = prepared(operands, mesh, right, causal=causal, layout=layout)
    plain = by(backend="xla")
    config = attention_config.Config(tiles=AttentionTiles(tile_k=64), pull_slots=2)
    others = dataclasses.replace(config, backward=attention_config.CUDNN)
    each = [dict(config=config), dict(config=others)]
    for options in each if scale.rehearsed else ({}, *each):
        found = by(backend=scale.backend, method="fused", **options)
        tally.checks(1)
        assert (found <= 1.5 * plain + 1e-3).all(), (options, found, plain)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("dim", "causal", "layout", "in_order"),
    [
        (64, True, "zigzag", True),
        (64, False, "contiguous", False),
        (128, True, "zigzag", True),
        (128, True, "contiguous", False),
        (128, False, "zigzag", True),
    ],
)
def test_the_kernel_with_documents(dim, causal, layout, in_order, mesh, scale, tally) -> None:
    operands = drawn(mesh.size, 256 if scale.rehearsed else 1024, dim)
    ids = jax.random.randint(jax.random.key(1), operands[0].shape[:2], 0, 5 if in_order else 2)
    ids = jnp.sort(ids) if in_order else ids
    right = exact(operands, causal, ids)
    by = prepared(operands, mesh, right, causal=causal, layout=layout, ids=ids)
    plain = by(backend="xla")
    config = attention_config.Config(tiles=AttentionTiles(tile_k=64), pull_slots=2)
    others = dataclasses.replace(config, backward=attention_config.CUDNN)
    each = [dict(config=config), dict(config=others)]
    for options in each if scale.rehearsed else ({}, *each):
        found = by(backend=scale.backend, method="fused", **options)
        tally.checks(1)
        assert (found <= 1.5 * plain + 1e-3).all(), (options, found, plain)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (8, 8), (1, 8)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_on_one_device(dim, window, queries, keys, scale, tally) -> None:
    """Of whole tiles, and of a tile with rows for one warpgroup only; without a mask, too."""
    blocks = 64 if scale.rehearsed else 128
    config = attention_config.config_for(dim)
    if scale.rehearsed:
        config = attention_config.Config(tiles=AttentionTiles(tile_k=64))
        queries, keys = min(queries, 3), min(keys, 3)
    q, *others = drawn(1, blocks * max(queries, keys), dim)
    q, (k, v, _) = q[:, : blocks * queries], (x[:, : blocks * keys] for x in others)
    causal = queries == keys
    mask = Mask(causal=causal, window=window if causal else None)

    @jax.jit
    def both(q, k, v):
        how = attention_config.Sequence(causal=mask.causal, window=mask.window)
        found = attention.attend(*(q, k, v, None, how), scale=dim**-0.5, config=config)
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        tokens = Tokens(jnp.arange(q.shape[1])), Tokens(jnp.arange(k.shape[1]))
        return found, blockwise.forward(*wide, *tokens, mask=mask, scale=dim**-0.5)

    (out, lse), (right, right_lse) = jax.tree.map(np.asarray, both(q, k, v))
    tally.checks(1)
    error = np.linalg.norm(out.astype(np.float32) - right) / np.linalg.norm(right)
    assert error < 1e-2
    np.testing.assert_allclose(lse, right_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (16, 16), (1, 16)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_of_the_derivative(dim, ordered, window, queries, keys, scale, tally) -> None:
    """Beside float32; without a mask, too; twice with the same bits, where blocks take turns."""
    if scale.rehearsed:
        queries, keys = min(queries, 3), min(keys, 3)
    q, k, v, bar = drawn(1, 128 * max(queries, keys), dim)
    q, bar = (x[:, : 128 * queries] for x in (q, bar))
    k, v = (x[:, : 128 * keys] for x in (k, v))
    causal = queries == keys
    mask = Mask(causal=causal, window=window if causal else None)
    sequence = attention_config.Sequence(causal=mask.causal, window=mask.window)
    how = dict(scale=dim**-0.5)

    @jax.jit
    def rows(*wide):
        tokens = Tokens(jnp.arange(q.shape[1])), Tokens(jnp.arange(k.shape[1]))
        out, lse = blockwise.forward(*wide[:3], *tokens, mask=mask, **how)
        right = blockwise.backward(*wide[:3], out, lse, wide[3], None, *tokens, mask=mask, **how)
        return lse, jnp.einsum("bthd,bthd->bht", out, wide[3]), right

    @jax.jit
    def derived(*given):
        return attention_derivative.derive(
            *given, sequence, config=DerivativeTiles(ordered=ordered), **how
        )

    lse, delta, right = rows(*(x.astype(jnp.float32) for x in (q, k, v, bar)))
    found, again = (derived(q, k, v, bar, lse, delta) for _ in range(2))
    tally.checks(1)
    assert max(errors(found, [np.asarray(x) for x in right])) < 1e-2
    assert max(errors(again, [np.asarray(x) for x in right])) < 1e-2
    for x, y in zip(found, again, strict=True):
        assert (x == y).all() or not ordered
