"""Attention whose heads a team of devices splits, over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from stretto.kernels.problem.checks import check_array, check_integer
from stretto.layers import products
from stretto.layers.linear import (
    ColumnParallelLinear,
    Initializer,
    RowParallelLinear,
    kernel_initializer,
)
from stretto.layers.parallel import DEFAULT, Parallel, check_sizes
from stretto.layers.placement import on_devices
from stretto.layers.products import Affine


class Attention(nnx.Module):
    """Multi-head self-attention, of which each device of the team computes some heads.

    `query`, `key` and `value` are `ColumnParallelLinear`, with columns ordered by head, and `out`
    is `RowParallelLinear`. Tokens are gathered once for the three, so that a device has whole
    sequences for its heads; results go back to their tokens.

    Parameters are those of `nnx.MultiHeadAttention` with the dimensions of heads joined: `[in,
    heads * head_dim]` for `[in, heads, head_dim]`, and equal for equal `rngs`.

    Args:
      num_heads: of the queries.
      in_features: of x.
      qkv_features: of all heads of queries together; by default `in_features`.
      out_features: of the result; by default `in_features`.
      num_kv_heads: of keys and values, each for `num_heads / num_kv_heads` consecutive heads of
        queries; by default `num_heads`. A multiple of the team's devices.
      attention_fn: takes a device's `query [batch, tokens, heads, head_dim]`, `key` and `value
        [batch, tokens, kv_heads, head_dim]`, `mask=` and `is_causal=`, and returns an array of the
        shape of `query`. Apply rotary positions here.
      parallel: axis of the mesh, and the sharding of activations.
      kernel_init: of `query`, `key` and `value`; also of `out`, unless `out_kernel_init` is given.
      out_kernel_init: of `out`.
      rngs: for the initialisers, of `query`, `key`, `value` and `out`.
      **options: of all linear layers, as of `ColumnParallelLinear`: `use_bias`, `dtype`,
        `param_dtype`, `bias_init`, `promote_dtype`, `preferred_element_type`.

    Raises:
      ValueError: `qkv_features` is no multiple of `num_heads`, or `num_heads` none of
        `num_kv_heads`; in calls, the team cannot split the heads, or x is neither `[batch, tokens,
        features]` nor `[batch * tokens, features]` with `sequence`, of which each team has whole
        ones.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention,
        parallel: Parallel = DEFAULT,
        kernel_init: Initializer = kernel_initializer,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(num_heads, num_kv_heads, qkv_features)
        products.check_callable("attention_fn", attention_fn, "jax.nn.dot_product_attention")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = qkv_features // num_heads
        self.attention_fn = attention_fn
        self.parallel = parallel
        options = {**options, "parallel": parallel, "rngs": rngs}

        def heads(count: int) -> ColumnParallelLinear:
            features = count * self.head_dim
            return ColumnParallelLinear(in_features, features, kernel_init=kernel_init, **options)

        self.query, self.key, self.value = map(heads, (num_heads, num_kv_heads, num_kv_heads))
        self.out = RowParallelLinear(
            qkv_features,
            in_features if out_features is None else out_features,
            kernel_init=out_kernel_init or kernel_init,
            **options,
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        is_causal: bool = False,
        sequence: int | None = None,
    ) -> jax.Array:
        """The result, with the shape of `x` but `out_features`, and with its tokens split alike.

        Args:
          x: `[batch, tokens, features]`; or rows `[batch * tokens, features]`, sequence after
            sequence, with `sequence`.
          mask: bool `[batch or 1, heads or 1, tokens, tokens]`, False where attention is excluded;
            inside `jax.shard_map` for the device's own sequences and heads.
          is_causal: a token attends to itself and earlier tokens only.
          sequence: tokens of a sequence, if x has rows.
        """
        _check_input(x, sequence)
        layers = (self.query, self.key, self.value, self.out)

        def body(
            how: Parallel | None, x: jax.Array, mask: jax.Array | None, *weights: Affine
        ) -> jax.Array:
            return self._on_device(how, x, mask, weights, is_causal, sequence)

        return on_devices(
            body,
            self.parallel,
            x,
            [mask, *(layer.arrays() for layer in layers)],
            [self._mask_spec(mask), *(layer.specs() for layer in layers)],
            enters="tokens",
            leaves="tokens",
        )

    def _mask_spec(self, mask: jax.Array | None) -> P | None:
        if mask is None:
            return None
        if mask.ndim != 4:
            raise ValueError(
                f"mask has shape {mask.shape}; it must be [batch or 1, heads or 1, tokens, tokens]."
            )
        batch = self.parallel.batch_axes if mask.shape[0] > 1 else None
        return P(batch or None, self.parallel.axes if mask.shape[1] > 1 else None)

    def _on_device(
        self,
        how: Parallel | None,
        x: jax.Array,
        mask: jax.Array | None,
        weights: tuple[Affine, ...],
        is_causal: bool,
        sequence: int | None,
    ) -> jax.Array:
        *into, out_of = weights
        for name, weight in zip(("num_heads", *["num_kv_heads"] * 2), into, strict=True):
            if weight.kernel.shape[1] % self.head_dim:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of the team's devices along"
                    f" {self.parallel.axis_name!r}; pass other heads, or a mesh with fewer there."
                )
        found = products.columns(how, x, into, self.query.types())
        rows = found[0].shape[-2]
        tokens = rows if sequence is None else sequence
        if rows % tokens:
            raise ValueError(
                f"sequence={tokens} must divide the {rows} rows of x that a team has: whole"
                " sequences; pass the tokens of one sequence."
            )
        query, key, value = (
            y.reshape(-1, tokens, y.shape[-1] // self.head_dim, self.head_dim) for y in found
        )
        seen = self.attention_fn(query, key, value, mask=mask, is_causal=is_causal)
        return products.rows(how, seen.reshape(found[0].shape), out_of, self.out.types())


def _check_heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, qkv_features=qkv_features)
    check_sizes("Attention", **sizes)
    if qkv_features % num_heads:
        raise ValueError(
            f"qkv_features={qkv_features} must be a multiple of num_heads={num_heads}."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}."
        )


def _check_input(x: jax.Array, sequence: int | None) -> None:
    check_array("Attention", "x", x)
    if x.ndim == 3 and sequence is None:
        return
    if sequence is not None and check_integer("Attention", "sequence", sequence) < 1:
        raise ValueError(f"sequence={sequence} must be at least 1, the tokens of one sequence.")
    if x.ndim != 2 or sequence is None:
        raise ValueError(
            f"x has shape {x.shape}, with sequence={sequence}; pass [batch, tokens, features], or"
            " [batch * tokens, features] with sequence=tokens."
        )
