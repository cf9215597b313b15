"""The experts of a mixture, distributed over a team of devices; tokens are sent there and back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.kernels.operations import fp8
from stretto.kernels.operations.mixture import mixture_of_experts
from stretto.kernels.problem import activations
from stretto.kernels.problem.checks import check_array
from stretto.layers import products
from stretto.layers.linear import NOTHING, Initializer, parameter
from stretto.layers.parallel import (
    DEFAULT,
    Parallel,
    check_divides,
    check_parallel,
    check_sizes,
)
from stretto.layers.placement import on_devices

LAYER = "MixtureOfExperts"
ALONE = "team"  # The axis of the mesh of one device.


def _expert_initializer(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal values `[experts, in, out]` with a variance of `1 / in`, for each expert."""
    return nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)(
        key, shape, dtype
    )


class MixtureOfExperts(nnx.Module):
    """`sum_j weight_j * expert_j(x)` over the `top_k` experts with the highest scores of a token.

    An expert is `down(activation(up(x)))` or, gated, `down(activation(gate(x)) * up(x))`. Each of D
    devices holds `num_experts / D` whole experts, and a part of the tokens. Tokens are sent to the
    devices of their experts and back (`stretto.mixture_of_experts`).

    The router is not part of the layer: pass its `scores`. Parameters are `gate` (for gated
    experts) and `up` `[num_experts, in, hidden]`, and `down` `[num_experts, hidden, in]`.

    Args:
      num_experts: over all devices.
      in_features, hidden_features: of an expert.
      top_k: experts of a token.
      activation: of float32 arrays, elementwise; or a name: "gelu", "silu", "relu", "tanh".
      gated: whether experts have a gate, as in SwiGLU.
      normalised: whether the weights of a token's experts are scaled to sum to 1.
      capacity: the largest number of rows on a device, as in `stretto.expert_dispatch`; by
        default no row is dropped.
      parallel: the mesh axes that split the experts, and the sharding of activations; with
        `sequence_parallel`. With `fp8`, tokens are quantised before they are sent, and products
        are in 8 bits (`stretto.fp8.mixture_of_experts`).
      kernel_init: for gate and up; also for down, unless `out_kernel_init` is given.
      out_kernel_init: for down.
      dtype: of the operands; by default their promoted type.
      param_dtype: of the parameters.
      promote_dtype: converts operands, with `dtype=`.
      rngs: for the initialisers, of `gate`, `up` and `down`.

    Raises:
      ValueError: `activation` is neither a function nor a known name, `top_k` is not between 1 and
        `num_experts`, or `parallel` does not split tokens; in calls, the team cannot split the
        experts or the tokens, or `scores` do not match x.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        top_k: int,
        activation: Callable[[jax.Array], jax.Array] | str = jax.nn.silu,
        gated: bool = True,
        normalised: bool = True,
        capacity: int | None = None,
        parallel: Parallel = DEFAULT,
        kernel_init: Initializer = _expert_initializer,
        out_kernel_init: Initializer | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        promote_dtype: products.Promote = dtypes.promote_dtype,
        rngs: nnx.Rngs,
    ):
        check_parallel(parallel)
        sizes = dict(in_features=in_features, hidden_features=hidden_features)
        check_sizes(LAYER, num_experts=num_experts, top_k=top_k, **sizes)
        check_divides(parallel, LAYER, "num_experts", num_experts)
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}.")
        if not parallel.sequence_parallel:
            raise ValueError(
                "sequence_parallel=False leaves all tokens on every device, which would all send"
                " them; pass a Parallel with sequence_parallel=True."
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activations.of_experts(LAYER, activation, gated=False)
        self.normalised = normalised
        self.capacity = capacity
        self.parallel = parallel
        self.dtype = dtype
        self.promote_dtype = promote_dtype

        def matrices(init: Initializer, *shape: int) -> nnx.Param:
            value = init(rngs.params(), (num_experts, *shape), param_dtype)
            return parameter(value, parallel, self._spec(), NOTHING)

        into = (in_features, hidden_features)
        self.gate: nnx.Param | None = nnx.data(None)
        if gated:
            self.gate = matrices(kernel_init, *into)
        self.up = matrices(kernel_init, *into)
        self.down = matrices(out_kernel_init or kernel_init, *into[::-1])

    def __call__(self, x: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The result, with the shape and sharding of `x`, and the number of tokens of each expert.

        Args:
          x: `[..., tokens, in_features]`.
          scores: `[..., tokens, num_experts]`, not negative, such as a router's softmax.

        Returns:
          (out, int32 `[num_experts]`): the counts are of the team's tokens inside
          `jax.shard_map`, and of all tokens in global-view code. A load-balancing loss needs them
          and the scores.
        """
        check_array(LAYER, "x", x)
        check_array(LAYER, "scores", scores)
        if scores.shape != (*x.shape[:-1], self.num_experts):
            raise ValueError(
                f"scores has shape {scores.shape}; with x {x.shape} it must be"
                f" {(*x.shape[:-1], self.num_experts)}, a number for each expert."
            )
        weights, index = lax.top_k(scores.astype(jnp.float32), self.top_k)
        if self.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        up = [self.up[...]] if self.gate is None else [self.gate[...], self.up[...]]
        kernels = (*up, self.down[...])
        return on_devices(
            self._on_device,
            self.parallel,
            (x, weights, index),
            [kernels],
            [(self._spec(),) * len(kernels)],
            enters="tokens",
            leaves="tokens",
            counts=True,
        )

    def _spec(self) -> P:
        axes = self.parallel.axes
        return P(axes[0] if len(axes) == 1 else axes, None, None)

    def _on_device(
        self, how: Parallel | None, routed: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        if how is None:
            return self._alone(routed, kernels)
        return self._in_team(how, routed, kernels)

    def _alone(
        self, routed: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """On one device: a team of one."""
        x = routed[0]
        device = jax.devices()[0] if isinstance(x, Tracer) else next(iter(x.devices()))
        return jax.shard_map(
            lambda *operands: self._in_team(Parallel(ALONE), *operands),
            mesh=Mesh([device], (ALONE,)),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )(routed, kernels)

    def _in_team(
        self, how: Parallel, routed: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        x, weights, index = routed
        rows = math.prod(x.shape[:-1])
        x_rows, *into, out_of = self.promote_dtype(
            (x.reshape(rows, x.shape[-1]), *kernels), dtype=self.dtype
        )
        activation, is_gated = self.activation, len(into) == 2
        layer = mixture_of_experts
        if how.fp8 is not None:
            layer = functools.partial(fp8.mixture_of_experts, recipe=how.fp8)
        out, routing = layer(
            x_rows,
            index.reshape(rows, self.top_k),
            weights.reshape(rows, self.top_k),
            tuple(into) if is_gated else into[0],
            out_of,
            how.axis_name,
            activation=_Gated(activation) if is_gated else activation,
            capacity=self.capacity,
            backend=how.backend,
        )
        return out.reshape(*x.shape[:-1], out.shape[-1]), routing.tokens_per_expert


@dataclasses.dataclass(frozen=True)
class _Gated:
    """`activation(gate) * up`: hashable, and equal where the activation is."""

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate) * up
