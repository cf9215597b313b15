"""Attention of a device's queries to gathered keys, by cuDNN, without keys that a mask excludes.

Each of the device's chunks of the sequence is a causal call on its own keys, the diagonal, and a
call without a mask on all keys before it. The first needs nothing from other devices. How many keys
lie before a chunk depends on the device, and one program serves all devices, so cuDNN reads the
number at run time. The two results are merged in float32 by their logsumexps.

Derivatives are computed for each part, from the logsumexp of all keys. Those of the own keys are
separate from those of gathered keys, since they are not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stretto.distributed.private_jax import cudnn_attention as cudnn
from stretto.kernels.attention.folding import folded, folded_rows, unfolded, unfolded_rows
from stretto.kernels.attention.layouts import Span
from stretto.kernels.attention.masks import Mask
from stretto.kernels.attention.shares import Share, counted, joined, merged
from stretto.kernels.problem.machine import Machine

TYPES = ("bfloat16", "float16")
type Pair = tuple[jax.Array, jax.Array]


def obstacle(
    q: jax.Array | jax.ShapeDtypeStruct, mask: Mask, *, segments: bool, devices: int
) -> str | None:
    """Why cuDNN cannot serve; None if it can.

    Args:
      q: the queries, or their shape and type.
      mask: of all queries.
      segments: whether tokens belong to documents.
      devices: that the keys are gathered from.
    """
    machine = Machine.of_mesh()
    if machine.platform != "gpu" or not _is_here():
        return f"the devices are {machine.platform}, not GPUs that are at hand."
    if str(q.dtype) not in TYPES:
        return f"cuDNN's attention takes {' and '.join(TYPES)}, not {q.dtype}."
    if q.shape[-1] > cudnn.MOST_DIM or q.shape[-1] % cudnn.DIM_STEP:
        return (
            f"cuDNN's attention takes head sizes of up to {cudnn.MOST_DIM} in steps of"
            f" {cudnn.DIM_STEP}, not {q.shape[-1]}."
        )
    if segments:
        return "cuDNN's attention does not get segment ids here."
    if mask.window is not None and devices > 1:
        return "cuDNN has no mask for a window that reaches across chunks."
    return cudnn.obstacle()


def _is_here() -> bool:
    """Whether a GPU is present: JAX reads its properties when it lowers cuDNN's attention."""
    return jax.default_backend() == "gpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys and values `[batch, keys, kv_heads, dim]`.

    Attributes:
      own: of this device.
      before: of all devices, in the order of the sequence where the mask is causal; None of one
        device, which has all in `own`.
    """

    own: Pair
    before: Pair | None


class _Part(NamedTuple):
    """A chunk of the device's queries, and the gathered keys before it."""

    start: int
    size: int
    limit: int  # the most keys that lie before it on any device
    keys: jax.Array  # how many do on this one


def forward(q: jax.Array, keys: Keys, span: Span, mask: Mask, scale: float) -> Share:
    """Attention to all keys, of q's type."""
    if not mask.causal:
        return Share(*cudnn.forward(q, *(keys.before or keys.own), scale=scale))
    chunks = span.chunks
    out, lse = cudnn.forward(
        *(folded(x, chunks) for x in (q, *keys.own)),
        scale=scale,
        causal=True,
        window=mask.window,
    )
    out, lse = unfolded(out, chunks), unfolded_rows(lse, chunks)
    shares = []
    for part in _parts(q, span):
        own = Share(_queries(out, part), _rows(lse, part))
        if keys.before is not None and part.limit:
            known = tuple(x[:, : part.limit] for x in keys.before)
            found = cudnn.forward(_queries(q, part), *known, scale=scale, keys=part.keys)
            own = merged([own, counted(Share(*found), part.keys)], q.dtype)
        shares.append(own)
    return joined(shares)


def backward(
    q: jax.Array,
    keys: Keys,
    out: jax.Array,
    lse: jax.Array,
    out_bar: jax.Array,
    span: Span,
    mask: Mask,
    scale: float,
) -> tuple[jax.Array, Pair | None, Pair | None]:
    """(q_bar, bars of the own keys, bars of the gathered keys); None where there are none."""
    if not mask.causal:
        given = keys.before or keys.own
        q_bar, k_bar, v_bar = cudnn.backward(q, *given, out, lse, out_bar, scale=scale)
        bars = k_bar, v_bar
        return (q_bar, bars, None) if keys.before is None else (q_bar, None, bars)
    chunks = span.chunks
    queries, k, v, own_out, own_bar = (folded(x, chunks) for x in (q, *keys.own, out, out_bar))
    diagonal = cudnn.backward(
        queries,
        k,
        v,
        own_out,
        folded_rows(lse, chunks),
        own_bar,
        scale=scale,
        causal=True,
        window=mask.window,
    )
    q_bar, k_bar, v_bar = (unfolded(x, chunks).astype(jnp.float32) for x in diagonal)
    own_bars = k_bar, v_bar
    if keys.before is None:
        return q_bar, own_bars, None
    sums = [jnp.zeros(x.shape, jnp.float32) for x in keys.before]
    q_bars = []
    for part in _parts(q, span):
        share = _queries(q_bar, part)
        if part.limit:
            known = keys.before[0][:, : part.limit], keys.before[1][:, : part.limit]
            rest = (_queries(out, part), _rows(lse, part), _queries(out_bar, part))
            found = cudnn.backward(_queries(q, part), *known, *rest, scale=scale, keys=part.keys)
            share += jnp.where(part.keys > 0, found[0].astype(jnp.float32), 0)
            within = (jnp.arange(part.limit) < part.keys)[:, None, None]
            sums = [
                total.at[:, : part.limit].add(jnp.where(within, x.astype(jnp.float32), 0))
                for total, x in zip(sums, found[1:], strict=True)
            ]
        q_bars.append(share)
    return jnp.concatenate(q_bars, 1), own_bars, (sums[0], sums[1])


def _parts(q: jax.Array, span: Span) -> Iterator[_Part]:
    size = q.shape[1] // span.chunks
    for i, (number, limit) in enumerate(zip(span.numbers, span.limits, strict=True)):
        yield _Part(i * size, size, limit * size, jnp.asarray(number * size, jnp.int32))


def _queries(x: jax.Array, part: _Part) -> jax.Array:
    return x[:, part.start : part.start + part.size]


def _rows(x: jax.Array, part: _Part) -> jax.Array:
    return x[:, :, part.start : part.start + part.size]
