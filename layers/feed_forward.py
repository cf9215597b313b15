"""The feed-forward layer: two products with an activation between them, plain or gated."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from stretto.kernels.problem.epilogues import Function as Epilogue
from stretto.layers import products
from stretto.layers.linear import (
    ColumnParallelLinear,
    Initializer,
    RowParallelLinear,
    kernel_initializer,
)
from stretto.layers.parallel import DEFAULT, Parallel
from stretto.layers.placement import on_devices
from stretto.layers.products import Affine


class FeedForward(nnx.Module):
    """`down(activation(up(x)))` or, gated, `down(activation(gate(x)) * up(x))`.

    `up` and `gate` are `ColumnParallelLinear`, `down` is `RowParallelLinear`. Tokens are gathered
    once for both, during the products, and the sums of the last product are scattered to them.

    Args:
      in_features, hidden_features: sizes, over all devices.
      out_features: by default `in_features`.
      activation: an elementwise function: each device has some of the hidden features.
      gated: with a gate, as SwiGLU (`activation=jax.nn.silu`).
      parallel: axis of the mesh, and the sharding of activations.
      kernel_init: of gate and up; also of down, unless `out_kernel_init` is given.
      out_kernel_init: of down.
      rngs: for the initialisers, of `gate` (if there is one), `up` and `down`.
      **options: of all linear layers, as of `ColumnParallelLinear`: `use_bias`, `dtype`,
        `param_dtype`, `bias_init`, `promote_dtype`, `preferred_element_type`.

    Raises:
      ValueError: `activation` is no function or, in calls on a mesh, it mixes elements.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Epilogue = jax.nn.gelu,
        gated: bool = False,
        parallel: Parallel = DEFAULT,
        kernel_init: Initializer = kernel_initializer,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        products.check_callable("activation", activation, "jax.nn.gelu")
        options = {**options, "parallel": parallel, "rngs": rngs}
        into = (in_features, hidden_features)
        self.gate: ColumnParallelLinear | None = nnx.data(None)
        if gated:
            self.gate = ColumnParallelLinear(*into, kernel_init=kernel_init, **options)
        self.up = ColumnParallelLinear(*into, kernel_init=kernel_init, **options)
        self.down = RowParallelLinear(
            hidden_features,
            in_features if out_features is None else out_features,
            kernel_init=out_kernel_init or kernel_init,
            **options,
        )
        self.activation = activation
        self.parallel = parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., tokens, in_features]` to `[..., tokens, out_features]`, tokens split alike."""
        into = (self.up,) if self.gate is None else (self.gate, self.up)
        layers = (*into, self.down)
        return on_devices(
            self._on_device,
            self.parallel,
            x,
            [layer.arrays() for layer in layers],
            [layer.specs() for layer in layers],
            enters="tokens",
            leaves="tokens",
        )

    def _on_device(self, how: Parallel | None, x: jax.Array, *weights: Affine) -> jax.Array:
        *into, out_of = weights
        if self.gate is None:
            (hidden,) = products.columns(how, x, into, self.up.types(), self.activation)
        else:
            hidden = products.gated(how, x, into[0], into[1], self.up.types(), self.activation)
        return products.rows(how, hidden, out_of, self.down.types())
