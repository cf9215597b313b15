"""A decoder-only language model whose projections overlap their own communication.

It runs inside `jax.shard_map`. Devices along the mesh axis "tp" share each sequence's work. Between
the layers of `stretto.flax` each of them has some of the sequences' bytes (*rows*) and all of a row's
columns; inside attention and the feed-forward layer it has all rows and some of the columns. Along "cp" each
device has some bytes of every sequence, a chunk from both ends, and attention sees the others' keys:

    x           [rows / tp, hidden]                    norms, sums and the loss see rows one by one
    q, k, v     [rows, columns of this device's heads]   all_gather_matmul(norm(x), three weights)
    attention   [rows, columns of this device's heads]   needs all keys of a sequence, heads one by one
    x           [rows / tp, hidden]                    x + matmul_reduce_scatter(attention, ...)
    gate, up    [rows, feed_forward / tp]              all_gather_matmul(norm(x), two weights)
    x           [rows / tp, hidden]                    x + matmul_reduce_scatter(silu(gate) * up, ...)

With experts (`Sizes.experts`) there is a mixture of them in place of the feed-forward layer. They are
dealt out over the devices of all groups, "dp" and "tp", and each row goes to those of its experts:

    scores      [rows / tp, experts]                   softmax(norm(x) @ router)
    x           [rows / tp, hidden]                    x + mixture_of_experts(norm(x), scores, ...)

The weights are the same whatever "tp" is: a device has some of the columns, or rows, of each.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import config
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import stretto as st
import stretto.flax as sf

normal = nnx.initializers.normal

AXES = ("dp", "tp")  # of the mesh (`parallel`)
EPSILON = 1e-5  # of the norms
ROTARY_BASE = 10000.0


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / rms(x) * scale`, row by row, in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + EPSILON) * scale).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions: turns pairs of columns of `x` `[batch, tokens, heads, head_dim]`.

    The pair (i, i + head_dim / 2) of the token at place p is turned by p * base ** (-2 i /
    head_dim); `positions` `[tokens]` are the places.
    """
    pairs = x.shape[-1] // 2
    rates = ROTARY_BASE ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = positions.astype(jnp.float32)[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryAttention:
    """What a device does with its heads: it turns queries and keys, then attends.

    With `cp` above 1 its tokens are those that it has in zigzag along "cp".
    """

    implementation: Literal["xla", "cudnn"]
    cp: int = 1
    backend: str = "auto"

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **masks: Any
    ) -> jax.Array:
        """`[batch, tokens, heads, head_dim]` of queries; keys and values may have fewer heads."""
        if self.cp > 1:
            return self._over_split_sequences(query, key, value, **masks)
        positions = jnp.arange(query.shape[1])
        query, key = rotate(query, positions), rotate(key, positions)
        return jax.nn.dot_product_attention(
            query, key, value, implementation=self.implementation, **masks
        )

    def _over_split_sequences(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: None, is_causal: bool
    ) -> jax.Array:
        positions = st.token_positions(query.shape[1], "cp", layout="zigzag")
        query, key = rotate(query, positions), rotate(key, positions)
        return st.context_parallel_attention(
            *(query, key, value, "cp"), causal=is_causal, layout="zigzag", backend=self.backend
        )


def _is_attention_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


# What the backward pass keeps of a layer, by `Execution.remat`, besides what comes into it. Stretto
# gives the name "gathered" to what an all-gather matmul has gathered. With a whole "layer" only the
# sum is kept, and the rest is computed again: of four matmuls and transfers, two. Of a mixture of
# experts "dispatched" are the rows that came to a device's experts, "experts" their first product.
# Attention over split sequences has the name "attention", and parts, of which nothing need be kept.
_only = jax.checkpoint_policies.save_only_these_names
KEEP = {
    "elementwise": jax.checkpoint_policies.save_from_both_policies(
        _only("gathered", "product", "dispatched", "experts", "sum"), _is_attention_of_cudnn
    ),
    "layer": _only("sum"),
}
KEEP_SPLIT = {**KEEP, "elementwise": _only("gathered", "product", "sum", "attention")}


def recipe(how: config.Execution) -> st.fp8.Recipe | None:
    """How the products' operands are quantised: forward float8_e4m3fn, gradients float8_e5m2."""
    return None if how.fp8 is None else st.fp8.Recipe(granularity=how.fp8)


class Experts(nnx.Module):
    """A mixture of experts, its router, and how evenly that spreads the bytes."""

    def __init__(self, sizes: config.Sizes, **options: Any):
        self.router = nnx.Param(
            normal(0.02)(options["rngs"].params(), (sizes.hidden, sizes.experts))
        )
        self.experts = sf.MixtureOfExperts(
            sizes.experts, sizes.hidden, sizes.feed_forward, top_k=sizes.top_k, **options
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[rows / tp, hidden]` to the same, and this device's share of the load-balancing loss.

        That is `experts * sum_e (share of choices that fell on e) * (mean score of e)`, at least 1
        (Fedus et al., "Switch Transformers", 2021, equation 4). Choices have no derivative.
        """
        wide = x.astype(jnp.float32)
        scores = jax.nn.softmax(wide @ self.router[...].astype(jnp.float32))
        out, load = self.experts(x, scores)
        rows = lax.axis_size(AXES) * x.shape[0]
        share = load.astype(jnp.float32) / (rows * self.experts.top_k)
        return out, self.experts.num_experts * jnp.sum(share * jnp.sum(scores, axis=0)) / rows


class Block(nnx.Module):
    """One layer: attention and feed-forward, each added to what it reads, after a norm."""

    def __init__(self, sizes: config.Sizes, how: config.Execution, rngs: nnx.Rngs):
        self.sequence = sizes.sequence // how.cp
        hidden, width = sizes.hidden, sizes.feed_forward
        out_of = (2 * sizes.layers) ** -0.5  # so that the sum over layers keeps its size
        into = dict(kernel_init=normal(hidden**-0.5), rngs=rngs)
        options: Any = dict(
            parallel=sf.Parallel("tp", backend=how.backend, keep_gathered=True, fp8=recipe(how)),
            use_bias=False,
            **into,
        )
        self.attention_norm = nnx.Param(jnp.ones(hidden))
        self.attention = sf.Attention(
            sizes.heads,
            hidden,
            num_kv_heads=sizes.kv_heads,
            attention_fn=RotaryAttention(how.attention, how.cp, how.backend),
            out_kernel_init=normal(hidden**-0.5 * out_of),
            **options,
        )
        self.mlp_norm = nnx.Param(jnp.ones(hidden))
        back = normal(width**-0.5 * out_of)
        self.mlp: sf.FeedForward | Experts
        if sizes.experts:
            spread = sf.Parallel(AXES, backend=how.backend, fp8=recipe(how))
            self.mlp = Experts(sizes, parallel=spread, out_kernel_init=back, **into)
        else:
            self.mlp = sf.FeedForward(
                hidden, width, activation=jax.nn.silu, gated=True, out_kernel_init=back, **options
            )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """`[rows / tp, hidden]` to the same; with experts, their share of the balancing loss."""
        normed = rms_norm(x, self.attention_norm[...])
        x = x + self.attention(normed, is_causal=True, sequence=self.sequence)
        x = checkpoint_name(x, "sum")
        normed = rms_norm(x, self.mlp_norm[...])
        if isinstance(self.mlp, sf.FeedForward):
            return x + self.mlp(normed), None
        out, balance = self.mlp(normed)
        return x + out, balance


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out.

    The table of bytes and the last projection are small (256 rows or columns), so every device has
    them whole, and neither sends anything.
    """

    def __init__(self, sizes: config.Sizes, how: config.Execution, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=sizes.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Block:
            with nnx.use_eager_sharding(False):  # `parallel` says where weights lie
                return Block(sizes, how, rngs)

        self.blocks: Block = stack(rngs)  # every weight has a first dimension for the layers
        self.how = how
        table = (config.VOCABULARY, sizes.hidden)
        self.embedding = nnx.Param(normal(0.02)(rngs.params(), table))
        self.norm = nnx.Param(jnp.ones(sizes.hidden))
        self.head = nnx.Param(normal(0.02)(rngs.params(), table[::-1]))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """tokens int32 `[rows / tp]` to logits float32 `[rows / tp, 256]`.

        The rows are this device's parts of sequences along "cp", one after the other, and device i
        of "tp" has the i-th part of them. With experts the second result is the device's share of
        the mean balancing loss of a layer.
        """
        # A lookup as a matmul: its gradient adds up in the same order on every run, on GPUs too.
        x = jax.nn.one_hot(tokens, config.VOCABULARY, dtype=self.how.dtype) @ self.embedding[...]

        def layer(x: jax.Array, block: Block) -> tuple[jax.Array, jax.Array | None]:
            return block(x)

        # A scan prevents the merging that `prevent_cse` is about.
        keep = (KEEP if self.how.cp == 1 else KEEP_SPLIT)[self.how.remat]
        layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)
        x, balances = lax.scan(layer, x, self.blocks)
        logits = jnp.matmul(
            rms_norm(x, self.norm[...]), self.head[...], preferred_element_type=jnp.float32
        )
        return logits, None if balances is None else jnp.mean(balances)
