"""Activations of experts, by name or as functions: of a product, or of its two halves if gated.

All are in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

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


def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate) * up


PLAIN: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    dict(gelu=jax.nn.gelu, silu=jax.nn.silu, relu=jax.nn.relu, tanh=jnp.tanh)
)
GATED: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(dict(swiglu=swiglu, geglu=_geglu))


def of_experts(
    op: str, given: Callable[..., jax.Array] | str | None, *, gated: bool
) -> Callable[..., jax.Array]:
    """What a caller gave as `activation=`; by default "swiglu" of gated experts, and else "gelu".

    Raises:
      ValueError: an unknown name, or one of the other kind of experts; or it is no function.
    """
    if given is None:
        return swiglu if gated else jax.nn.gelu
    if not isinstance(given, str):
        if callable(given):
            return given
        raise ValueError(
            f"{op}: activation={given!r:.60} is of type {type(given).__name__}; pass a function or"
            f" a name: {_names(PLAIN)}, of gated experts {_names(GATED)}."
        )
    known, kind = (GATED, "gated experts") if gated else (PLAIN, "experts that are not gated")
    if given not in known:
        raise ValueError(
            f"{op}: activation={given!r} is not one of {_names(known)}, the activations of {kind}."
        )
    return known[given]


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(map(repr, known))
