"""Attention by heads: every device computes some heads for all tokens, and sends the results back.

DeepSpeed-Ulysses (S. A. Jacobs et al., arXiv:2309.14509). A device needs the keys and
values of its heads of queries. So kv_heads that the devices do not divide are sent several times:

    8 kv_heads on 16 devices: each is sent twice, and two devices have the same one
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.attention.layouts import CONTIGUOUS, Span, from_zigzag, to_zigzag
from stretto.kernels.attention.peers import Keys, Queries
from stretto.kernels.attention.shares import Share
from stretto.kernels.operation import Call
from stretto.kernels.operations.collectives import all_to_all
from stretto.kernels.xla.matmul import accumulator_dtype

TOKENS, OF_HEADS = 1, 2  # dimensions of `[batch, tokens, heads, dim]`


def copies(kv_heads: int, devices: int) -> int:
    """How often each head of keys is sent, so that all devices get equally many."""
    return devices // math.gcd(kv_heads, devices)


def obstacle(heads: int, kv_heads: int, devices: int) -> str | None:
    """Why the devices cannot divide the heads; None if they can."""
    if heads % devices:
        return f"heads={heads} of q must be a multiple of the {devices} devices."
    sent = kv_heads * copies(kv_heads, devices)
    if heads % sent:
        return (
            f"kv_heads={kv_heads} on {devices} devices are sent as {sent}, which must divide"
            f" heads={heads} of q."
        )
    return None


def exchanged(operands: Any, call: Call) -> Any:
    """q, k and v of all tokens and some heads, in the order of the sequence under a causal mask."""
    repeated = functools.partial(jnp.repeat, repeats=call.options.copies, axis=OF_HEADS)
    q, k, v = operands.q, repeated(operands.k), repeated(operands.v)
    return operands._replace(
        q=_ordered(_to_heads(q, call), call),
        k=_ordered(_to_heads(k, call), call),
        v=_ordered(_to_heads(v, call), call),
        segments=_gathered(operands.segments, call),
        kv_segments=_gathered(operands.kv_segments, call),
    )


def attend(local: Any, call: Call) -> Share:
    """Attention of the device's heads to all tokens."""
    return _queries(local, call).attend(Keys(local.k, local.v, local.kv_segments))


def attend_by_lax(local: Any, call: Call) -> Share:
    """The same by `jax.lax`, differentiable in forward mode, in q's type."""
    found = attend(local, call.with_options(by_cudnn=False))
    return Share(found.out.astype(local.q.dtype), found.lse)


def returned(share: Share, call: Call) -> Share:
    """All heads of the device's tokens."""
    out = _to_tokens(_by_device(share.out, call), call)
    if not call.options.logsumexp:
        return Share(out, share.lse)
    lse = _by_device(share.lse, call, axis=2)
    lse = all_to_all(lse, call.axes, split_axis=2, concat_axis=1, backend="xla")
    return Share(out, lse)


def derived(
    local: Any, share: Share, out_bar: jax.Array, lse_bar: jax.Array | None, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of the device's own q, k and v."""
    bar = _ordered(_to_heads(out_bar.astype(local.q.dtype), call), call)
    if lse_bar is not None:
        lse_bar = all_to_all(lse_bar, call.axes, split_axis=1, concat_axis=2, backend="xla")
        lse_bar = _ordered(jnp.asarray(lse_bar), call, axis=2)
    queries, keys = _queries(local, call), Keys(local.k, local.v, local.kv_segments)
    q_bar, k_bar, v_bar = (
        _to_tokens(_by_device(x, call).astype(local.q.dtype), call)
        for x in queries.derive(keys, share, bar, lse_bar)
    )
    return q_bar, _without_copies(k_bar, call), _without_copies(v_bar, call)


def _queries(local: Any, call: Call) -> Queries:
    options = call.options
    return Queries(
        q=local.q,
        segments=local.segments,
        span=Span(CONTIGUOUS, 1, 0),
        mask=options.mask,
        scale=options.scale,
        by_cudnn=options.by_cudnn,
    )


def _without_copies(bar: jax.Array, call: Call) -> jax.Array:
    """The sum over a head's copies, in float32 or wider, rounded to the type of what was sent."""
    batch, tokens, sent, dim = bar.shape
    count = call.options.copies
    wide = bar.astype(accumulator_dtype(bar.dtype))
    return wide.reshape(batch, tokens, sent // count, count, dim).sum(3).astype(bar.dtype)


def _to_heads(x: jax.Array, call: Call) -> jax.Array:
    return _exchange(x, call, OF_HEADS, TOKENS)


def _to_tokens(x: jax.Array, call: Call) -> jax.Array:
    return _exchange(x, call, TOKENS, OF_HEADS)


def _exchange(x: jax.Array, call: Call, split: int, concat: int) -> jax.Array:
    moves = call.options.moves
    return all_to_all(x, call.axes, split_axis=split, concat_axis=concat, backend=moves)


def _ordered(x: jax.Array, call: Call, axis: int = TOKENS) -> jax.Array:
    """All devices' tokens, in the order of the sequence if the mask depends on positions."""
    devices = axis_size(call.axes)
    is_cut = call.options.mask.causal and call.options.span(call.axes).chunks > 1
    return from_zigzag(x, devices, axis=axis) if is_cut else x


def _by_device(x: jax.Array, call: Call, axis: int = TOKENS) -> jax.Array:
    """The inverse of `_ordered`."""
    devices = axis_size(call.axes)
    is_cut = call.options.mask.causal and call.options.span(call.axes).chunks > 1
    return to_zigzag(x, devices, axis=axis) if is_cut else x


def _gathered(segments: jax.Array | None, call: Call) -> jax.Array | None:
    if segments is None:
        return None
    every = jax.lax.all_gather(segments, call.axes, axis=TOKENS, tiled=True)
    return _ordered(every, call)
