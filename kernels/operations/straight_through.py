"""Derivatives of products that round their operands to 8 bits: those of the product without rounding.

| | computed |
|---|---|
| reverse mode | in 8 bits, as the product's own rule does it |
| forward mode, and derivatives of a derivative | by XLA, in the operands' own types |

Reverse mode keeps what the rule needs, such as operands in 8 bits. The operands themselves are
residuals too, which forward mode reads; where nothing does, the compiler drops them.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.primitives.linear import linear
from stretto.kernels.operation import Arrays
from stretto.kernels.operations.as_bits import from_bits, to_bits
from stretto.kernels.problem.promotion import by_default_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Of a product; each function gets first what the product is besides its operands.

    Attributes:
      forward: operands -> (results, what the backward pass keeps), in 8 bits.
      backward: operands, what was kept, cotangents of the results -> cotangents of the operands.
        It reads of the operands only what is there anyway, such as weights.
      wide: operands -> results, without rounding, by operations of XLA.
    """

    forward: Callable[[Any, Arrays], tuple[Arrays, Any]]
    backward: Callable[[Any, Arrays, Any, Arrays], Arrays]
    wide: Callable[[Any, Arrays], Arrays]


def product(rules: Rules, how: Any, operands: Arrays) -> Arrays:
    """The results of `rules.forward`, differentiable in every direction."""
    both: Any = _forward(rules, how, operands)
    return both[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(rules: Rules, how: Any, operands: Arrays) -> tuple[Arrays, Any]:
    return rules.forward(how, operands)


@_forward.defjvp
@by_default_rules
def _forward_jvp(rules: Rules, how: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """No derivative goes through the rounding of what is kept."""
    (operands,), (dots,) = primals, tangents
    both: Any = _forward(rules, how, operands)
    results, kept = both
    varying = jax.tree.map(varying_axes, results)

    @by_default_rules
    def tangent(residuals: Any, dots: Arrays) -> Arrays:
        wide = functools.partial(rules.wide, how)
        found = jax.jvp(wide, (residuals[0],), (dots,))[1]
        return jax.tree.map(make_varying, found, varying)

    @by_default_rules
    def transpose(residuals: Any, bars: Arrays) -> Arrays:
        operands, bits = residuals
        return _backward(rules, how, operands, from_bits(bits), bars)

    results_dot = linear(tangent, transpose, (operands, to_bits(kept)), dots)
    return (results, kept), (results_dot, jax.tree.map(jnp.zeros_like, kept))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(rules: Rules, how: Any, operands: Arrays, kept: Any, bars: Arrays) -> Arrays:
    return rules.backward(how, operands, kept, bars)


@_backward.defjvp
@by_default_rules
def _backward_jvp(rules: Rules, how: Any, primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
    operands, _, bars = primals
    operands_dot, _, bars_dot = tangents

    def wide(operands: Arrays, bars: Arrays) -> Arrays:
        (found,) = jax.vjp(functools.partial(rules.wide, how), operands)[1](bars)
        return found

    _, dots = jax.jvp(wide, (operands, bars), (operands_dot, bars_dot))
    return _backward(rules, how, *primals), dots
