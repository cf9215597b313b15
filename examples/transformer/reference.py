"""The same model on one device, written out in plain JAX: what the tests compare with."""

from __future__ import annotations

import config
import jax
import jax.numpy as jnp
from model import EPSILON, ROTARY_BASE
from parallel import Tree


def loss(
    weights: Tree, tokens: jax.Array, targets: jax.Array, sizes: config.Sizes, dtype: str
) -> jax.Array:
    """Mean loss in nats per byte of int32 `[batch, sequence]`; `weights` as `parallel` has them.

    With experts, and what balances them.
    """
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x = weights["embedding"][tokens]
    balance = jnp.float32(0)
    for number in range(sizes.layers):
        layer = jax.tree.map(lambda w, number=number: w[number], weights["blocks"])
        x = x + _attention(layer["attention"], _norm(x, layer["attention_norm"]), sizes)
        normed = _norm(x, layer["mlp_norm"])
        if sizes.experts:
            out, uneven = _experts(layer["mlp"], normed, sizes)
            x, balance = x + out, balance + uneven / sizes.layers
        else:
            x = x + _feed_forward(layer["mlp"], normed)
    logits = _norm(x, weights["norm"]).astype(jnp.float32) @ weights["head"].astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    nats = -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], axis=-1))
    return nats + config.BALANCE * balance


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)
    return (wide / size * scale).astype(x.dtype)


def _attention(layer: Tree, x: jax.Array, sizes: config.Sizes) -> jax.Array:
    """Head by head, with the whole matrix of scores."""
    sequence, head_dim = x.shape[1], sizes.head_dim
    may_see = jnp.tril(jnp.ones((sequence, sequence), bool))

    def heads(name: str, count: int) -> list[jax.Array]:  # [batch, sequence, head_dim] each
        return jnp.split(x @ layer[name]["kernel"], count, axis=-1)

    keys, values = heads("key", sizes.kv_heads), heads("value", sizes.kv_heads)
    outs = []
    for number, query in enumerate(heads("query", sizes.heads)):
        kv_head = number * sizes.kv_heads // sizes.heads
        k, v = _rotate(keys[kv_head]), values[kv_head]
        scores = jnp.einsum("bqd,bkd->bqk", _rotate(query), k).astype(jnp.float32)
        scores = jnp.where(may_see, scores / head_dim**0.5, -jnp.inf)
        outs.append(jax.nn.softmax(scores).astype(x.dtype) @ v)
    return jnp.concatenate(outs, axis=-1) @ layer["out"]["kernel"]


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of `[batch, sequence, head_dim]`, as products of complex numbers."""
    sequence, pairs = x.shape[1], x.shape[2] // 2
    rates = ROTARY_BASE ** (-jnp.arange(pairs) / pairs)
    turns = jnp.exp(1j * jnp.arange(sequence)[:, None] * rates)
    wide = x.astype(jnp.float32)
    turned = (wide[..., :pairs] + 1j * wide[..., pairs:]) * turns
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def _feed_forward(layer: Tree, x: jax.Array) -> jax.Array:
    gate, up, down = (layer[name]["kernel"] for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _experts(layer: Tree, x: jax.Array, sizes: config.Sizes) -> tuple[jax.Array, jax.Array]:
    """Every expert on every byte, of which those that it did not choose count nothing."""
    scores = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"].astype(jnp.float32))
    best = jnp.sort(scores, axis=-1)[..., -sizes.top_k, None]
    chosen = scores >= best
    weights = jnp.where(chosen, scores, 0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    gate, up, down = (layer["experts"][name] for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up)
    made = jnp.einsum("bsef,efd->bsed", hidden, down).astype(jnp.float32)
    out = jnp.einsum("bsed,bse->bsd", made, weights)
    share = jnp.mean(chosen, axis=(0, 1)) / sizes.top_k
    uneven = sizes.experts * jnp.sum(share * jnp.mean(scores, axis=(0, 1)))
    return out.astype(x.dtype), uneven
