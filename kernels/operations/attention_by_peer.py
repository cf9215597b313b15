"""Attention with keys that one peer after another sends, and its derivative.

Attention to each peer's keys is a call of its own, after that to the own keys, and their
derivatives are sent as soon as they are computed. XLA's schedule decides what overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.attention.peers import Keys, Queries
from stretto.kernels.attention.shares import Share, merged, sum_of
from stretto.kernels.operation import Axes, Call
from stretto.kernels.operations import attention_fused as fused
from stretto.kernels.operations.attention_options import Operands
from stretto.kernels.xla.matmul import accumulator_dtype

MERGED_AT_ONCE = 4
"""The most shares that are in memory before they are merged; each is as large as the result."""


def _queries(operands: Operands, call: Call) -> tuple[Queries, Keys]:
    options = call.options
    queries = Queries(
        q=operands.q,
        segments=operands.segments,
        span=options.span(call.axes),
        mask=options.mask,
        scale=options.scale,
        by_cudnn=options.by_cudnn,
    )
    return queries, Keys(operands.k, operands.v, operands.kv_segments)


def _peers(own: Keys, call: Call) -> Iterator[tuple[int, jax.Array, Keys]]:
    """(distance along the axes, the peer, its keys); each is sent directly by its owner.

    XLA overlaps one transfer at a time with other work, and schedules further transfers before it
    (seen in the schedules of JAX 0.11.2 for H100s and H200s). So keys and values are one array.
    With several peers, all keys but the last peer's still arrive before any attention.
    """
    devices, device = axis_size(call.axes), lax.axis_index(call.axes)
    sent = jnp.stack([own.k, own.v]), own.segments
    for distance in range(1, devices):
        (k, v), segments = shifted(sent, call.axes, -distance)
        yield distance, (device + distance) % devices, Keys(k, v, segments)


def shifted(x: Any, axes: Axes, distance: int) -> Any:
    """`x`, a tree of arrays, on the device that is `distance` further on."""
    devices = axis_size(axes)
    to = [(i, (i + distance) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, to), x)


def attend(operands: Operands, call: Call) -> Share:
    """Attention to all keys."""
    queries, own = _queries(operands, call)
    shares, dtype = [queries.attend(own)], operands.q.dtype
    for _, peer, keys in _peers(own, call):
        if len(shares) == MERGED_AT_ONCE:
            shares = [merged(shares, accumulator_dtype(dtype))]
        shares.append(queries.attend(keys, peer))
    return merged(shares, dtype)


def derive(
    operands: Operands,
    share: Share,
    out_bar: jax.Array,
    lse_bar: jax.Array | None,
    call: Call,
    kept: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q_bar, k_bar, v_bar), k_bar and v_bar of the own keys.

    The own keys come first, and the peers' arrive meanwhile. If these are `kept` from the forward
    pass (`attention_fused`) the own keys come last, and the peers' derivatives are sent meanwhile.
    Where the kernel derives it stores them at the keys' owners itself.
    """
    queries, own = _queries(operands, call)
    wide = accumulator_dtype(operands.q.dtype)
    by_kernel = fused.derivation(operands, share, out_bar, lse_bar, call)
    if by_kernel is not None:
        each = [by_kernel(own, 0)]
        of_peers = _peers(own, call)
        if kept is not None:
            of_peers = fused.kept_keys(kept, operands, call, all_are_read=False)
        each += [by_kernel(keys, distance) for distance, _, keys in of_peers]
        q_bar, k_bar, v_bar = (sum_of(bars, wide) for bars in zip(*each, strict=True))
        return q_bar, k_bar, v_bar
    q_bars, kv_bars = [], []

    def derive_own(own: Keys) -> None:
        q_bar, *found = queries.derive(own, share, out_bar, lse_bar)
        q_bars.append(q_bar)
        kv_bars.append(found)

    if kept is None:
        derive_own(own)
        of_peers = _peers(own, call)
    else:
        by_lax = not queries.by_cudnn or lse_bar is not None
        of_peers = fused.kept_keys(kept, operands, call, all_are_read=by_lax)
    for distance, peer, keys in of_peers:
        q_bar, narrow = queries.derive_to_send(keys, share, out_bar, lse_bar, peer)
        q_bars.append(q_bar)
        if kept is not None and distance == axis_size(call.axes) - 1:
            # XLA would begin with the own keys: they wait for nothing.
            k, v, narrow = lax.optimization_barrier((own.k, own.v, narrow))
            own = own._replace(k=k, v=v)
        kv_bars.append(shifted(narrow, call.axes, distance))
    if kept is not None:
        derive_own(own)
    k_bar, v_bar = (sum_of(bars, wide) for bars in zip(*kv_bars, strict=True))
    return sum_of(q_bars, wide), k_bar, v_bar
