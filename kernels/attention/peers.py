"""Attention of a device's queries to the keys of one device after another, as they arrive.

The device's own keys are first: they need no transfer. In both layouts a device holds its tokens in
the order of the sequence, so a causal mask over the own keys is a causal mask over positions in the
arrays. Of a peer's keys, a chunk of queries attends to all chunks before it: these are the first
chunks of the peer. Their number depends on both devices, and one program serves all, so cuDNN reads
it at run time. All shares are merged once, at the end. The derivative of each share uses the
logsumexp of all keys. Where keys have fewer heads than queries, both chunks are one call with a
batch of two and the keys twice: that copies less than splitting the queries.

    zigzag, own chunks i and 2n - 1 - i | peer j < i | peer j > i
    the early chunk attends to          | chunk j    | none
    the late chunk attends to           | chunk j    | both
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stretto.distributed.private_jax import cudnn_attention as cudnn
from stretto.kernels.attention import blockwise
from stretto.kernels.attention.folding import folded, folded_rows, unfolded, unfolded_rows
from stretto.kernels.attention.layouts import Span
from stretto.kernels.attention.masks import Mask, Tokens
from stretto.kernels.attention.shares import Share, counted, joined, sum_of
from stretto.kernels.xla.matmul import accumulator_dtype

type Bars = tuple[jax.Array, jax.Array, jax.Array]


class Keys(NamedTuple):
    """Keys and values of one device, `[batch, keys, kv_heads, dim]`, and their documents."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None = None


class _Chunk(NamedTuple):
    """A chunk of the device's queries, and the keys of a peer that it attends to."""

    start: int
    size: int
    limit: int  # the most keys of a peer that it sees on any device
    keys: jax.Array  # how many it sees of this one's

    def of(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """The chunk's part of an array of the device's queries."""
        return jax.lax.slice_in_dim(x, self.start, self.start + self.size, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """A device's queries, with the mask and the implementation of their attention.

    Attributes:
      q: `[batch, queries, heads, dim]`.
      segments: their documents, or None.
      span: which tokens of the sequence they are.
      mask, scale: of the scores.
      by_cudnn: whether cuDNN serves; if not, `jax.lax`.
    """

    q: jax.Array
    segments: jax.Array | None
    span: Span
    mask: Mask
    scale: float
    by_cudnn: bool

    def attend(self, keys: Keys, device: jax.Array | int | None = None) -> Share:
        """The share of the keys of `device`; by default of the own keys."""
        if not self.by_cudnn:
            tokens, others = self._tokens(keys, device)
            found = blockwise.forward(
                *(self.q, keys.k, keys.v, tokens, others),
                mask=self.mask,
                scale=self.scale,
                out_dtype=accumulator_dtype(self.q.dtype),
            )
            return Share(*found)
        if device is None or not self.mask.causal:
            return Share(*cudnn.forward(self.q, keys.k, keys.v, **self._of_own(device)))
        if self._folds(keys):
            return self._attend_folded(keys, device)
        shares = []
        for chunk in self._chunks(keys, device):
            known = keys.k[:, : chunk.limit], keys.v[:, : chunk.limit]
            found = cudnn.forward(chunk.of(self.q), *known, scale=self.scale, keys=chunk.keys)
            shares.append(counted(Share(*found), chunk.keys))
        return joined(shares)

    def derive(
        self,
        keys: Keys,
        whole: Share,
        out_bar: jax.Array,
        lse_bar: jax.Array | None = None,
        device: jax.Array | int | None = None,
    ) -> Bars:
        """(q_bar, k_bar, v_bar) of the share of `device`'s keys.

        Args:
          keys, device: as of `attend`.
          whole: attention to all keys.
          out_bar, lse_bar: its cotangents; with that of the logsumexp, `jax.lax` serves.
        """
        if not self.by_cudnn or lse_bar is not None:
            tokens = self._tokens(keys, device)
            return blockwise.backward(
                *(self.q, keys.k, keys.v),
                *(whole.out, whole.lse, out_bar, lse_bar),
                *tokens,
                mask=self.mask,
                scale=self.scale,
            )
        if device is None or not self.mask.causal:
            given = self.q, keys.k, keys.v, whole.out, whole.lse, out_bar
            return cudnn.backward(*given, **self._of_own(device))
        if self._folds(keys):
            return self._derive_folded(keys, whole, out_bar, device)
        q_bars, k_bars, v_bars = [], [], []
        for chunk in self._chunks(keys, device):
            known = keys.k[:, : chunk.limit], keys.v[:, : chunk.limit]
            rest = chunk.of(whole.out), chunk.of(whole.lse, 2), chunk.of(out_bar)
            found = cudnn.backward(
                chunk.of(self.q), *known, *rest, scale=self.scale, keys=chunk.keys
            )
            q_bars.append(jnp.where(chunk.keys > 0, found[0], 0))
            within = (jnp.arange(chunk.limit) < chunk.keys)[:, None, None]
            missing = keys.k.shape[1] - chunk.limit
            for bars, bar in zip((k_bars, v_bars), found[1:], strict=True):
                bar = jnp.where(within, bar, 0).astype(jnp.float32)
                bars.append(jnp.pad(bar, ((0, 0), (0, missing), (0, 0), (0, 0))))
        return jnp.concatenate(q_bars, 1), sum_of(k_bars), sum_of(v_bars)

    def _folds(self, keys: Keys) -> bool:
        return self.span.chunks > 1 and self.q.shape[2] > keys.k.shape[2]

    def _folded_keys(
        self, keys: Keys, device: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """k and v for every chunk, and how many of them each chunk of each sequence sees."""
        seen = jnp.stack([chunk.keys for chunk in self._chunks(keys, device)])
        k, v = (jnp.repeat(x, self.span.chunks, axis=0) for x in (keys.k, keys.v))
        return k, v, jnp.tile(seen, len(keys.k))

    def _attend_folded(self, keys: Keys, device: jax.Array | int) -> Share:
        chunks = self.span.chunks
        k, v, seen = self._folded_keys(keys, device)
        out, lse = cudnn.forward(folded(self.q, chunks), k, v, scale=self.scale, keys=seen)
        out, lse = counted(Share(out, lse), seen[:, None, None])
        return Share(unfolded(out, chunks), unfolded_rows(lse, chunks))

    def _derive_folded(
        self, keys: Keys, whole: Share, out_bar: jax.Array, device: jax.Array | int
    ) -> Bars:
        chunks = self.span.chunks
        k, v, seen = self._folded_keys(keys, device)
        q, out, bar = (folded(x, chunks) for x in (self.q, whole.out, out_bar))
        rest = out, folded_rows(whole.lse, chunks), bar
        found = cudnn.backward(q, k, v, *rest, scale=self.scale, keys=seen)
        seen = seen[:, None, None, None]
        q_bar = jnp.where(seen > 0, found[0], 0)
        within = jnp.arange(k.shape[1])[:, None, None] < seen

        def of_keys(bar: jax.Array) -> jax.Array:
            bar = jnp.where(within, bar, 0).astype(jnp.float32)
            return bar.reshape(-1, chunks, *bar.shape[1:]).sum(1)

        return unfolded(q_bar, chunks), of_keys(found[1]), of_keys(found[2])

    def _of_own(self, device: jax.Array | int | None) -> dict:
        """cuDNN's arguments for a peer's whole keys, or for the own keys with their mask."""
        own = device is None and self.mask.causal
        return dict(scale=self.scale, causal=own, window=self.mask.window if own else None)

    def _chunks(self, keys: Keys, device: jax.Array | int) -> Iterator[_Chunk]:
        chunks, size = self.span.chunks, self.q.shape[1] // self.span.chunks
        peer = dataclasses.replace(self.span, device=device)
        for i, number in enumerate(self.span.numbers):
            before = sum(jnp.asarray(other < number, jnp.int32) for other in peer.numbers)
            seen = jnp.asarray(before, jnp.int32) * (keys.k.shape[1] // chunks)
            yield _Chunk(i * size, size, (i + 1) * (keys.k.shape[1] // chunks), seen)

    def _tokens(self, keys: Keys, device: jax.Array | int | None) -> tuple[Tokens, Tokens]:
        span = self.span if device is None else dataclasses.replace(self.span, device=device)
        return (
            Tokens(self.span.positions(self.q.shape[1]), self.segments),
            Tokens(span.positions(keys.k.shape[1]), keys.segments),
        )
