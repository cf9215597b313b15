"""Activations of gated experts: functions of the two halves of a product, in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up` (Shazeer, "GLU Variants Improve Transformer")."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """`gate * sigmoid(alpha * gate) * (up + 1)` of clamped operands, as in gpt-oss.

    Attributes:
      limit: gate is at most this, and up between it and its negative.
      alpha: factor of the sigmoid's operand.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Of `gate` and `up`, elementwise."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
