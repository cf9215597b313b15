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
    """Mean loss in nats per byte of int32 `[batch, sequence]`; `weights` as `parallel` has them."""
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x = weights["embedding"][tokens]
    for number in range(sizes.layers):
        layer = jax.tree.map(lambda w, number=number: w[number], weights["blocks"])
        x = x + _attention(layer["attention"], _norm(x, layer["attention_norm"]), sizes)
        x = x + _feed_forward(layer["mlp"], _norm(x, layer["mlp_norm"]))
    logits = _norm(x, weights["norm"]).astype(jnp.float32) @ weights["head"].astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], axis=-1))


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
