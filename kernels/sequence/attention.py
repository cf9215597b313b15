"""`context_parallel_attention`: attention over a sequence whose tokens are split between devices.

Keys and values are gathered (`stretto.all_gather`); each device computes its own queries, by cuDNN
where it serves and block by block with `jax.lax` elsewhere. The backward pass gathers again, takes
every part's derivative from the logsumexp of all keys, and hands k's and v's to their owners
(`stretto.reduce_scatter`). These cross in k's type and are added in float32 where the kernel adds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.attention import blockwise, cudnn
from stretto.kernels.attention.layouts import CONTIGUOUS, Span, check_layout
from stretto.kernels.attention.masks import Mask, Tokens
from stretto.kernels.operations.collectives import all_gather, reduce_scatter
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem import checks

OP = "context_parallel_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    axes: tuple[Any, ...]
    layout: str
    mask: Mask
    scale: float
    backend: str
    by_cudnn: bool

    @property
    def span(self) -> Span:
        return Span(self.layout, axis_size(self.axes), lax.axis_index(self.axes))


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: AxisNames,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = CONTIGUOUS,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    return_logsumexp: bool = False,
    backend: str = "auto",
) -> Any:
    """`softmax(scale q k^T) v` over the whole sequence, inside `jax.shard_map`; differentiable.

    | operand | shape per device | type |
    |---|---|---|
    | q | `[batch, tokens, heads, dim]` | floating-point |
    | k, v | `[batch, kv_tokens, kv_heads, dim]`, kv_heads a divisor of heads | q's |
    | segment_ids, kv_segment_ids | `[batch, tokens]`, `[batch, kv_tokens]` | integer |
    | out | q's | q's |

    A query whose mask leaves no key gets 0, and a logsumexp of minus infinity. cuDNN serves 16 bit
    types on GPUs, head sizes to 256, without segment ids and, on several devices, without a window;
    `jax.lax` serves the rest, block by block, in memory linear in the tokens.

    Args:
      axis_name: mesh axis, or tuple of axes, that the tokens are split along.
      causal: a query sees no key behind itself; k and v are then as long as q.
      scale: of the scores; `dim ** -0.5` by default.
      layout: "contiguous", or "zigzag" (`to_zigzag`), in which a causal mask costs all devices
        alike; of q, k and v.
      window: the most keys that a query sees, itself included; with `causal`.
      segment_ids: of documents packed into one sequence; a query sees its own document only.
      kv_segment_ids: of the keys; those of the queries by default.
      return_logsumexp: also return float32 `[batch, tokens, heads]`. Then the backward pass is by
        `jax.lax`: cuDNN's takes no cotangent of it.
      backend: what moves k and v, as of `all_gather`.

    Raises:
      ValueError: operands that do not fit each other, an unknown layout, axis or backend, an odd
        number of tokens in zigzag.

    Memory: k and v of the whole sequence, in zigzag once more in their own order; in the backward
    pass float32 sums of their derivatives.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    _check(q, k, v, causal, window)
    check_layout(OP, layout, q_tokens=q.shape[1], kv_tokens=k.shape[1])
    checks.check_backend(backend)
    if kv_segment_ids is None and q.shape[1] == k.shape[1]:
        kv_segment_ids = segment_ids
    _check_segments(q, k, segment_ids, kv_segment_ids)
    mask = Mask(causal=causal, window=window)
    devices = axis_size(axes)
    unserved = cudnn.obstacle(q, mask, segments=segment_ids is not None, devices=devices)
    options = _Options(
        axes=axes,
        layout=layout,
        mask=mask,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        backend=backend,
        by_cudnn=unserved is None,
    )
    leaves, tree = jax.tree.flatten((q, k, v, segment_ids, kv_segment_ids))
    operands = jax.tree.unflatten(tree, typed_alike(axes, leaves))
    if not return_logsumexp:
        return _attend(options, *operands)
    out, lse = cast(Any, _attend_with_logsumexp(options, *operands))
    return out, lse.transpose(0, 2, 1)


def _gathered(options: _Options, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    if axis_size(options.axes) == 1:
        return k, v
    gather = functools.partial(all_gather, axis_name=options.axes, axis=1, backend=options.backend)
    return gather(k), gather(v)


def _tokens(options: _Options, q: Any, k: Any, segments: Any, others: Any) -> tuple[Tokens, Tokens]:
    if others is not None:
        others = lax.all_gather(others, options.axes, axis=1, tiled=True)
    span = options.span
    queries = Tokens(span.positions(q.shape[1]), segments)
    return queries, Tokens(span.all_positions(k.shape[1]), others)


def _keys(options: _Options, k: jax.Array, v: jax.Array) -> cudnn.Keys:
    if axis_size(options.axes) == 1:
        return cudnn.Keys(own=(k, v), before=None)
    every = _gathered(options, k, v)
    if options.mask.causal:
        every = options.span.in_order(every[0]), options.span.in_order(every[1])
    return cudnn.Keys(own=(k, v), before=every)


def _forward(options: _Options, q, k, v, segments, others) -> tuple[jax.Array, jax.Array]:
    mask, scale = options.mask, options.scale
    if options.by_cudnn:
        return cudnn.forward(q, _keys(options, k, v), options.span, mask, scale)
    tokens = _tokens(options, q, k, segments, others)
    return blockwise.forward(q, *_gathered(options, k, v), *tokens, mask=mask, scale=scale)


def _backward(options: _Options, kept: Any, out_bar: jax.Array, lse_bar: Any) -> tuple:
    q, k, v, segments, others, out, lse = kept
    mask, scale = options.mask, options.scale
    own = None
    if options.by_cudnn and lse_bar is None:
        keys, span = _keys(options, k, v), options.span
        q_bar, own, every = cudnn.backward(q, keys, out, lse, out_bar, span, mask, scale)
        if every is not None and mask.causal:
            every = tuple(span.by_device(x) for x in every)
    else:
        tokens = _tokens(options, q, k, segments, others)
        q_bar, *every = blockwise.backward(
            *(q, *_gathered(options, k, v), out, lse, out_bar, lse_bar, *tokens),
            mask=mask,
            scale=scale,
        )
    sent = [] if every is None else [_handed_over(options, x, k) for x in every]
    shares = [found for found in (sent, own) if found]
    bars = [functools.reduce(jnp.add, of_one) for of_one in zip(*shares, strict=True)]
    return q_bar.astype(q.dtype), *(x.astype(k.dtype) for x in bars), None, None


def _handed_over(options: _Options, bar: jax.Array, k: jax.Array) -> jax.Array:
    """The sum of all devices' shares of the own keys' derivative, float32 or wider."""
    if axis_size(options.axes) == 1:
        return bar
    narrow = bar.astype(k.dtype)
    backend = options.backend
    found = reduce_scatter(narrow, options.axes, axis=1, backend=backend)
    return found.astype(bar.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, *operands: Any) -> jax.Array:
    return _forward(options, *operands)[0]


def _attend_forward(options: _Options, *operands: Any) -> tuple[jax.Array, Any]:
    out, lse = _forward(options, *operands)
    return out, (*operands, out, lse)


_attend.defvjp(_attend_forward, lambda options, kept, bar: _backward(options, kept, bar, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_with_logsumexp(options: _Options, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(options, *operands)


def _attend_with_logsumexp_forward(options: _Options, *operands: Any) -> tuple[Any, Any]:
    out, lse = _forward(options, *operands)
    return (out, lse), (*operands, out, lse)


_attend_with_logsumexp.defvjp(
    _attend_with_logsumexp_forward, lambda options, kept, bars: _backward(options, kept, *bars)
)


def _check(q: Any, k: Any, v: Any, causal: bool, window: int | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_array(OP, name, x)
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{OP}: {name} has shape {x.shape}; it must be [batch, tokens, heads, dim]."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != q.dtype:
            raise ValueError(
                f"{OP}: {name} is {x.dtype} and q is {q.dtype}; all must be of one floating-point"
                " type. Cast them."
            )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{OP}: q {q.shape}, k {k.shape} and v {v.shape} must agree in batch and dim, and k and"
            " v in all."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{OP}: heads={q.shape[2]} of q must be a multiple of kv_heads={k.shape[2]}."
        )
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{OP}: causal=True needs as many keys as queries, not {k.shape[1]} for {q.shape[1]};"
            " pass causal=False."
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(f"{OP}: window={window} must be at least 1, and needs causal=True.")


def _check_segments(q: Any, k: Any, segments: Any, others: Any) -> None:
    if (segments is None) != (others is None):
        raise ValueError(
            f"{OP}: segment_ids and kv_segment_ids belong together; pass both or neither."
        )
    for name, ids, x in (("segment_ids", segments, q), ("kv_segment_ids", others, k)):
        if ids is None:
            continue
        checks.check_array(OP, name, ids)
        if ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"{OP}: {name} is {ids.dtype}{list(ids.shape)}; it must be of integers,"
                f" {list(x.shape[:2])}."
            )
