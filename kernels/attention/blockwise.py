"""Attention by `jax.lax` on any platform: block by block, in memory that is linear in the tokens.

Online softmax over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867; Dao, FlashAttention-2,
arXiv:2307.08691), for one block of queries after another. Sums are in float32, or wider. Products
of 16-bit operands round the weights to 16 bits too, as cuDNN does. Blocks that the mask excludes
are skipped. A query that sees no key has a result of 0, a logsumexp of minus infinity, and
derivatives of 0.

    forward: S = scale Q K^T, L = logsumexp(S), O = exp(S - L) V
    backward: P = exp(S - L), dV = P^T dO, dS = P (dO V^T - rowsum(dO O) + dL) scale,
              dQ = dS K, dK = dS^T Q

`L` may be the logsumexp of more keys than are given. The results are then the share of these keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.kernels.attention.masks import PADDING, Mask, Tokens, may_see, visible
from stretto.kernels.problem.machine import Machine
from stretto.kernels.xla.matmul import accumulator_dtype

BLOCK = 512
"""Tokens of a block, of queries and of keys."""


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    mask: Mask,
    scale: float,
    out_dtype: Any = None,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Attention and its logsumexp. Differentiable in forward mode; `backward` serves reverse mode.

    Args:
      q: `[batch, queries, heads, dim]`.
      k, v: `[batch, keys, kv_heads, dim]`.
      queries, keys: their positions and documents, for the mask.
      out_dtype: of the result; q's by default.

    Returns:
      (`[batch, queries, heads, dim]`, `[batch, heads, queries]` float32 or wider).
    """
    wide, kv_heads = accumulator_dtype(q.dtype), k.shape[2]
    qs, ks, vs = _head_blocks(q, kv_heads, block), _blocks(k, block), _blocks(v, block)
    q_tokens, k_tokens = _token_blocks(queries, block), _token_blocks(keys, block)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((q, k, v, queries, keys))))

    def of_queries(operands: tuple[jax.Array, Tokens]) -> tuple[jax.Array, jax.Array]:
        q, tokens = operands

        def of_keys(carry: Any, operands: tuple[jax.Array, jax.Array, Tokens]) -> tuple[Any, None]:
            k, v, others = operands

            def step() -> Any:
                scores = _scores(q, k, tokens, others, mask, scale)
                return _added(carry, scores, v)

            return lax.cond(may_see(mask, tokens, others), step, lambda: carry), None

        start = (
            jnp.full(q.shape[:-1], -jnp.inf, wide),
            jnp.zeros(q.shape[:-1], wide),
            jnp.zeros(q.shape, wide),
        )
        start = tuple(make_varying(x, axes) for x in start)
        (highest, total, out), _ = lax.scan(of_keys, start, (ks, vs, k_tokens))
        none = total == 0  # And not `total > 0`, which would make a result of NaN one without keys.
        total = jnp.where(none, 1, total)
        lse = jnp.where(none, -jnp.inf, highest + jnp.log(total))
        return out / total[..., None], lse

    out, lse = lax.map(of_queries, (qs, q_tokens))
    return _without_blocks(out, q.shape).astype(out_dtype or q.dtype), _rows(lse, q.shape)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    out_bar: jax.Array,
    lse_bar: jax.Array | None,
    queries: Tokens,
    keys: Tokens,
    *,
    mask: Mask,
    scale: float,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q_bar, k_bar, v_bar), float32 or wider, of these keys' share of the result.

    Args:
      out, lse: of all keys that the queries see, which may be more than are given here.
      out_bar, lse_bar: their cotangents; None for a logsumexp that nothing depends on.
    """
    wide, kv_heads = accumulator_dtype(q.dtype), k.shape[2]
    delta = jnp.einsum("bqhd,bqhd->bhq", out.astype(wide), out_bar.astype(wide))
    if lse_bar is not None:
        delta = delta - lse_bar
    qs, bars = (_head_blocks(x, kv_heads, block) for x in (q, out_bar))
    lses, deltas = (_row_blocks(x, kv_heads, block) for x in (lse, delta))
    q_tokens, k_tokens = _token_blocks(queries, block), _token_blocks(keys, block)
    inputs = (q, k, v, out, lse, out_bar, delta, queries, keys)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(inputs)))

    def of_keys(q_bar: jax.Array, operands: tuple) -> tuple[jax.Array, tuple]:
        k, v, others = operands

        def of_queries(carry: tuple, operands: tuple) -> tuple[tuple, jax.Array]:
            q, bar, lse, delta, tokens, q_bar = operands

            def step() -> tuple[tuple, jax.Array]:
                scores = _scores(q, k, tokens, others, mask, scale)
                weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
                found = _share(q, k, v, bar, delta, weights, scale)
                k_bar, v_bar = (x + y for x, y in zip(carry, found[1:], strict=True))
                return (k_bar, v_bar), q_bar + found[0]

            return lax.cond(may_see(mask, tokens, others), step, lambda: (carry, q_bar))

        start = tuple(make_varying(jnp.zeros(x.shape, wide), axes) for x in (k, v))
        kv_bars, q_bar = lax.scan(of_queries, start, (qs, bars, lses, deltas, q_tokens, q_bar))
        return q_bar, kv_bars

    start = make_varying(jnp.zeros(qs.shape, wide), axes)
    q_bar, kv_bars = lax.scan(of_keys, start, (_blocks(k, block), _blocks(v, block), k_tokens))
    k_bar, v_bar = (_joined(x, k.shape) for x in kv_bars)
    return _without_blocks(q_bar, q.shape), k_bar, v_bar


# --- One block of queries and one of keys ---------------------------------------------------------


def _scores(
    q: jax.Array, k: jax.Array, queries: Tokens, keys: Tokens, mask: Mask, scale: float
) -> jax.Array:
    """`[batch, kv_heads, group, queries, keys]`; minus infinity where a key is not seen."""
    scores = _product("bhgqd,bhkd->bhgqk", q, k) * scale
    return jnp.where(visible(mask, queries, keys)[:, None, None], scores, -jnp.inf)


def _added(carry: tuple, scores: jax.Array, v: jax.Array) -> tuple:
    """(highest score, sum of weights, sum of weighted values) with one more block of keys.

    The result does not depend on the highest score, which only keeps numbers small: it has no
    derivative.
    """
    highest, total, out = carry
    new = lax.stop_gradient(jnp.maximum(highest, jnp.max(scores, -1)))
    base = jnp.where(new == -jnp.inf, 0, new)
    weights = jnp.exp(scores - base[..., None])
    kept = jnp.exp(lax.stop_gradient(highest) - base)
    total = total * kept + jnp.sum(weights, -1)
    out = out * kept[..., None] + _product("bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v)
    return new, total, out


def _share(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bar: jax.Array,
    delta: jax.Array,
    weights: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The addends of the derivatives of a block of queries and of a block of keys."""
    weights_bar = _product("bhgqd,bhkd->bhgqk", bar, v)
    scores_bar = (weights * (weights_bar - delta[..., None]) * scale).astype(q.dtype)
    return (
        _product("bhgqk,bhkd->bhgqd", scores_bar, k),
        _product("bhgqk,bhgqd->bhkd", scores_bar, q),
        _product("bhgqk,bhgqd->bhkd", weights.astype(bar.dtype), bar),
    )


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = accumulator_dtype(x.dtype)
    if Machine.of_mesh().platform == "cpu":
        # XLA's CPU backend has no batched 16-bit product with a wider result (JAX 0.11.2).
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(equation, x, y, preferred_element_type=wide, precision=lax.Precision.HIGHEST)


# --- Blocks: a leading dimension of them, filled up -----------------------------------------------


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """`[batch, tokens, heads, dim]` -> `[blocks, batch, heads, block, dim]`."""
    x = _cut(x, 1, block)
    return x.transpose(1, 0, 3, 2, 4)


def _joined(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_blocks`, for an array of this shape."""
    batch, tokens, heads, dim = shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, dim)[:, :tokens]


def _head_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """`[batch, tokens, heads, dim]` -> `[blocks, batch, kv_heads, group, block, dim]`."""
    x = _blocks(x, block)
    count, batch, heads, size, dim = x.shape
    return x.reshape(count, batch, kv_heads, heads // kv_heads, size, dim)


def _without_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_head_blocks`, for an array of this shape."""
    count, batch, kv_heads, group, size, dim = x.shape
    return _joined(x.reshape(count, batch, kv_heads * group, size, dim), shape)


def _row_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """`[batch, heads, tokens]` -> `[blocks, batch, kv_heads, group, block]`."""
    x = _cut(x, 2, block)
    batch, heads, count, size = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, count, size).transpose(3, 0, 1, 2, 4)


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_row_blocks`, for an array `[batch, tokens, heads, dim]` of this shape."""
    batch, tokens, heads, _ = shape
    return x.transpose(1, 2, 3, 0, 4).reshape(batch, heads, -1)[:, :, :tokens]


def _token_blocks(tokens: Tokens, block: int) -> Tokens:
    """The tokens of each block; padding of the last block has no position."""
    positions = _cut(tokens.positions, 0, block, PADDING)
    if tokens.segments is None:
        return Tokens(positions)
    segments = _cut(tokens.segments, 1, block, edge=True)
    return Tokens(positions, segments.transpose(1, 0, 2))


def _cut(x: jax.Array, axis: int, block: int, fill: int = 0, edge: bool = False) -> jax.Array:
    """`x` with this axis cut into blocks, padded with `fill`, or with the last value."""
    size = x.shape[axis]
    block = min(block, size) if isinstance(size, int) else size  # All, if it is symbolic.
    count = -(-size // block)
    if count * block != size:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * block - size)
        x = jnp.pad(x, widths, mode="edge") if edge else jnp.pad(x, widths, constant_values=fill)
    return x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
