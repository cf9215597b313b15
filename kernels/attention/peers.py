"""Attention of a device's queries to the keys of one device after another, as they arrive.

The device's own keys are first: they need no transfer. In both layouts a device holds its tokens in
the order of the sequence, so a causal mask over the own keys is a causal mask over positions in the
arrays. Of a peer's keys, the queries that see any all see the same ones: a rectangle without a
mask, which is one call of cuDNN. Which rectangle depends on both devices, and one program serves
all, so it has a branch for each.

    own chunks i and 2n - 1 - i | peer j < i                | peer j > i
    zigzag                      | both chunks see chunk j   | the late chunk sees both chunks of j
    contiguous                  | all queries see all keys  | none

All shares are merged once, at the end. The derivative of each share uses the logsumexp of all keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.private_jax import cudnn_attention as cudnn
from stretto.kernels.attention import blockwise
from stretto.kernels.attention.layouts import Span
from stretto.kernels.attention.masks import Mask, Tokens
from stretto.kernels.attention.shares import Share
from stretto.kernels.xla.matmul import accumulator_dtype

type Bars = tuple[jax.Array, jax.Array, jax.Array]


class Keys(NamedTuple):
    """Keys and values of one device, `[batch, keys, kv_heads, dim]`, and their documents."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None = None


class _Rectangle(NamedTuple):
    """The queries from `first` on, which all see the first `keys` keys of a peer, and no others."""

    first: int
    keys: int


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
        return self._on_the_side_of(device, lambda part: self._attend_to(keys, part), keys)

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
        if self._is_by_lax(lse_bar):
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
        return self._on_the_side_of(
            device, lambda part: self._derive_of(keys, whole, out_bar, part), keys
        )

    def derive_to_send(
        self,
        keys: Keys,
        whole: Share,
        out_bar: jax.Array,
        lse_bar: jax.Array | None,
        device: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array]:
        """(q_bar, `[2, ...]` k_bar and v_bar of k's type, for one transfer); arguments as above."""

        def together(bars: Bars) -> tuple[jax.Array, jax.Array]:
            q_bar, *others = bars
            return q_bar, jnp.stack(others).astype(keys.k.dtype)

        if self._is_by_lax(lse_bar) or not self.mask.causal:
            return together(self.derive(keys, whole, out_bar, lse_bar, device))
        # In the branches, where it is one pass with the zeros that are added.
        return self._on_the_side_of(
            device, lambda part: together(self._derive_of(keys, whole, out_bar, part)), keys
        )

    def _is_by_lax(self, lse_bar: jax.Array | None) -> bool:
        return not self.by_cudnn or lse_bar is not None

    def _on_the_side_of[T](
        self, device: jax.Array | int, compute: Callable[[_Rectangle], T], keys: Keys
    ) -> T:
        """`compute` of the rectangle of a peer's keys that its place in the sequence leaves."""
        queries, count, chunks = self.q.shape[1], keys.k.shape[1], self.span.chunks
        if chunks > 1:
            before, behind = _Rectangle(0, count // chunks), _Rectangle(queries // chunks, count)
        else:
            before, behind = _Rectangle(0, count), _Rectangle(queries, 0)
        axes = frozenset().union(*map(varying_axes, (self.q, keys.k, keys.v)))

        def branch(part: _Rectangle) -> Callable[[], T]:
            return lambda: jax.tree.map(lambda x: make_varying(x, axes), compute(part))

        return lax.cond(device < self.span.device, branch(before), branch(behind))

    def _attend_to(self, keys: Keys, part: _Rectangle) -> Share:
        """The share of a rectangle; queries outside have a logsumexp of minus infinity."""
        if not part.keys:
            batch, queries, heads, _ = self.q.shape
            lse = jnp.full((batch, heads, queries), -jnp.inf, jnp.float32)
            return Share(jnp.zeros_like(self.q), lse)
        k, v = (x[:, : part.keys] for x in (keys.k, keys.v))
        out, lse = cudnn.forward(self.q[:, part.first :], k, v, scale=self.scale)
        lse = jnp.pad(lse, ((0, 0), (0, 0), (part.first, 0)), constant_values=-jnp.inf)
        return Share(_padded(out, before=part.first), lse)

    def _derive_of(self, keys: Keys, whole: Share, out_bar: jax.Array, part: _Rectangle) -> Bars:
        """The derivatives of a rectangle's share, of all queries and keys."""
        if not part.keys:
            return jnp.zeros_like(self.q), jnp.zeros_like(keys.k), jnp.zeros_like(keys.v)
        k, v = (x[:, : part.keys] for x in (keys.k, keys.v))
        q, out, bar = (x[:, part.first :] for x in (self.q, whole.out, out_bar))
        lse = whole.lse[:, :, part.first :]
        q_bar, *bars = cudnn.backward(q, k, v, out, lse, bar, scale=self.scale)
        missing = keys.k.shape[1] - part.keys
        k_bar, v_bar = (_padded(x, behind=missing) for x in bars)
        return _padded(q_bar, before=part.first), k_bar, v_bar

    def _of_own(self, device: jax.Array | int | None) -> dict:
        """cuDNN's arguments for a peer's whole keys, or for the own keys with their mask."""
        own = device is None and self.mask.causal
        return dict(scale=self.scale, causal=own, window=self.mask.window if own else None)

    def _tokens(self, keys: Keys, device: jax.Array | int | None) -> tuple[Tokens, Tokens]:
        span = self.span if device is None else dataclasses.replace(self.span, device=device)
        return (
            Tokens(self.span.positions(self.q.shape[1]), self.segments),
            Tokens(span.positions(keys.k.shape[1]), keys.segments),
        )


def _padded(x: jax.Array, *, before: int = 0, behind: int = 0) -> jax.Array:
    """`x` with so many tokens of zeros added on either side."""
    return jnp.pad(x, ((0, 0), (before, behind), (0, 0), (0, 0)))
