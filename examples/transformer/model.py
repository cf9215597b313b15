"""A decoder-only language model whose projections overlap their own communication.

It runs inside `jax.shard_map`. Devices along the mesh axis "tp" share each sequence's work. Between
the projections each of them has some of the sequences' bytes (*rows*) and all of a row's columns;
inside attention and the feed-forward layer it has all rows and some of the columns:

    x           [rows / tp, hidden]                    norms, sums and the loss see rows one by one
    qkv         [rows, columns of this device's heads]   all_gather_matmul(norm(x), qkv weights)
    attention   [rows, columns of this device's heads]   needs whole sequences, heads one by one
    x           [rows / tp, hidden]                    x + matmul_reduce_scatter(attention, ...)
    gate, up    [rows, feed_forward / tp]              all_gather_matmul(norm(x), ...)
    x           [rows / tp, hidden]                    x + matmul_reduce_scatter(silu(gate) * up, ...)

A weight's dimension that "tp" splits comes whole from the same projection's columns, so the weights
are the same whatever "tp" is: q, k and v lie head by head, gate and up in a dimension of their own.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import config
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import stretto as st

EPSILON = 1e-5  # of the norms
ROTARY_BASE = 10000.0


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / rms(x) * scale`, row by row, in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + EPSILON) * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: turns pairs of columns of `x` `[batch, sequence, ..., head_dim]`.

    The pair (i, i + head_dim / 2) at place p is turned by p * base ** (-2 i / head_dim).
    """
    sequence, pairs = x.shape[1], x.shape[-1] // 2
    rates = ROTARY_BASE ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = jnp.arange(sequence, dtype=jnp.float32)[:, None] * rates
    angles = angles.reshape(sequence, *[1] * (x.ndim - 3), pairs)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """`[rows, gate's columns and up's]` to `silu(gate) * up`."""
    gate, up = jnp.split(gate_up, 2, axis=1)
    return jax.nn.silu(gate) * up


def _is_attention_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


# What the backward pass keeps of a layer, by `Execution.remat`, besides what comes into it. Stretto
# gives the name "gathered" to what an all-gather matmul has gathered. With a whole "layer" only the
# sum is kept, and the rest is computed again: of four matmuls and transfers, two.
_only = jax.checkpoint_policies.save_only_these_names
KEEP = {
    "elementwise": jax.checkpoint_policies.save_from_both_policies(
        _only("gathered", "product", "sum"), _is_attention_of_cudnn
    ),
    "layer": _only("sum"),
}


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, split: int | None) -> nnx.Param:
    """A normal weight, float32, whose dimension `split` is divided over "tp"."""
    axes = tuple("tp" if dim == split else None for dim in range(len(shape)))
    value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


class Block(nnx.Module):
    """One layer: attention and feed-forward, each added to what it reads, after a norm."""

    def __init__(self, sizes: config.Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        hidden, width, head_dim = sizes.hidden, sizes.feed_forward, sizes.head_dim
        into = hidden**-0.5
        out_of = (2 * sizes.layers) ** -0.5  # so that the sum over layers keeps its size
        self.attention_norm = nnx.Param(jnp.ones(hidden))
        # For every head of keys and values: its heads of queries, then the key, then the value.
        qkv = (hidden, sizes.kv_heads, sizes.queries_per_kv + 2, head_dim)
        self.qkv = weight(rngs, qkv, into, split=1)
        self.attention_out = weight(rngs, (hidden, hidden), into * out_of, split=0)
        self.mlp_norm = nnx.Param(jnp.ones(hidden))
        self.gate_up = weight(rngs, (hidden, 2, width), into, split=2)
        self.down = weight(rngs, (width, hidden), width**-0.5 * out_of, split=0)

    def __call__(self, x: jax.Array, how: config.Execution) -> jax.Array:
        """`[rows / tp, hidden]` to the same."""
        x = x + self.attention(rms_norm(x, self.attention_norm[...]), how)
        x = checkpoint_name(x, "sum")
        return x + self.feed_forward(rms_norm(x, self.mlp_norm[...]), how)

    def attention(self, x: jax.Array, how: config.Execution) -> jax.Array:
        """Causal grouped-query attention over whole sequences, by this device's heads."""
        sizes = self.sizes
        qkv = st.all_gather_matmul(x, self.qkv[...], "tp", keep_gathered=True, backend=how.backend)
        qkv = checkpoint_name(qkv, "product")
        sequences, heads_of_a_key = len(qkv) // sizes.sequence, sizes.queries_per_kv + 2
        qkv = qkv.reshape(sequences, sizes.sequence, -1, heads_of_a_key, sizes.head_dim)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        q = rotate(q).reshape(*q.shape[:2], -1, sizes.head_dim)
        out = jax.nn.dot_product_attention(
            q, rotate(k), v, is_causal=True, implementation=how.attention
        )
        return st.matmul_reduce_scatter(
            out.reshape(sequences * sizes.sequence, -1),
            self.attention_out[...],
            "tp",
            backend=how.backend,
        )

    def feed_forward(self, x: jax.Array, how: config.Execution) -> jax.Array:
        """`(silu(x @ gate) * (x @ up)) @ down`, by this device's columns of gate and up."""
        gate_up = st.all_gather_matmul(
            x, self.gate_up[...], "tp", keep_gathered=True, backend=how.backend
        )
        gate_up = checkpoint_name(gate_up, "product")
        return st.matmul_reduce_scatter(swiglu(gate_up), self.down[...], "tp", backend=how.backend)


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out.

    The table of bytes and the last projection are small (256 rows or columns), so every device has
    them whole, and neither sends anything.
    """

    def __init__(self, sizes: config.Sizes, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=sizes.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(sizes, rngs)

        self.blocks: Block = stack(rngs)  # every weight has a first dimension for the layers
        self.embedding = weight(rngs, (config.VOCABULARY, sizes.hidden), 0.02, split=None)
        self.norm = nnx.Param(jnp.ones(sizes.hidden))
        self.head = weight(rngs, (sizes.hidden, config.VOCABULARY), 0.02, split=None)

    def __call__(self, tokens: jax.Array, how: config.Execution) -> jax.Array:
        """tokens int32 `[rows / tp]` to logits float32 `[rows / tp, 256]`.

        The rows are whole sequences, one after the other, and device i has the i-th part of them.
        """
        # A lookup as a matmul: its gradient adds up in the same order on every run, on GPUs too.
        x = jax.nn.one_hot(tokens, config.VOCABULARY, dtype=how.dtype) @ self.embedding[...]

        def layer(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return block(x, how), None

        # A scan prevents the merging that `prevent_cse` is about.
        layer = jax.checkpoint(layer, policy=KEEP[how.remat], prevent_cse=False)
        x, _ = lax.scan(layer, x, jax.tree.map(_as_matrices, self.blocks))
        return jnp.matmul(
            rms_norm(x, self.norm[...]), self.head[...], preferred_element_type=jnp.float32
        )


def _as_matrices(weights: jax.Array) -> jax.Array:
    """`[layers, hidden, ...]` as matrices of all their columns; moves nothing.

    Inside the scan it would be an array of its own, which the backward pass would keep.
    """
    return weights.reshape(*weights.shape[:2], -1) if weights.ndim > 2 else weights
