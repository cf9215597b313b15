"""`stretto.epilogues`: the common epilogues by name, and what `epilogue=` takes.

Each returns an `Epilogue`, whose arrays broadcast to the result of one device: a bias `[n]`, a
residual `[m, n]`. A bias of None adds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.problem.epilogue import Epilogue
from stretto.kernels.problem.epilogues import name_of
from stretto.kernels.problem.kernel_forms import gelu as _gelu

type Like = Epilogue | Callable[..., jax.Array] | str | tuple | None
"""What `epilogue=` takes: a function, a name, `(function, *arrays)`, or an `Epilogue`."""


def bias(array: Any) -> Epilogue:
    """`product + array`, an array such as `[n]`."""
    return Epilogue(_add, array)


def residual(array: Any) -> Epilogue:
    """`product + array`, an array such as `[m, n]`."""
    return Epilogue(_add, array)


def scale(array: Any) -> Epilogue:
    """`product * array`: a number, a row `[n]`, a column `[m, 1]` or a matrix."""
    return Epilogue(_times, array)


def mask(keep: Any) -> Epilogue:
    """The product where `keep` (bools, or floats that are not 0), and 0 elsewhere."""
    return Epilogue(_where, keep)


def gelu(bias: Any = None) -> Epilogue:
    """`gelu(product + bias)`, by the tanh approximation, as `jax.nn.gelu`."""
    return _with_bias(_gelu, bias)


def silu(bias: Any = None) -> Epilogue:
    """`silu(product + bias)`."""
    return _with_bias(jax.nn.silu, bias)


def relu(bias: Any = None) -> Epilogue:
    """`max(product + bias, 0)`."""
    return _with_bias(jax.nn.relu, bias)


def tanh(bias: Any = None) -> Epilogue:
    """`tanh(product + bias)`."""
    return _with_bias(jnp.tanh, bias)


def swiglu(gate_bias: Any = None, up_bias: Any = None) -> Epilogue:
    """`silu(gate + gate_bias) * (up + up_bias)` of the products with a pair of matrices."""
    return gated(jax.nn.silu, gate_bias, up_bias)


def geglu(gate_bias: Any = None, up_bias: Any = None) -> Epilogue:
    """`gelu(gate + gate_bias) * (up + up_bias)` of the products with a pair of matrices."""
    return gated(_gelu, gate_bias, up_bias)


def gated(
    activation: Callable[[jax.Array], jax.Array], gate_bias: Any = None, up_bias: Any = None
) -> Epilogue:
    """`activation(gate + gate_bias) * (up + up_bias)`: of `x @ w_gate` and `x @ w_up`."""
    biases = [x for x in (gate_bias, up_bias) if x is not None]
    function = _Gated(_recognised(activation), gate_bias is not None, up_bias is not None)
    return Epilogue(function, *biases, gated=True)


def chain(first: Like, *others: Like) -> Epilogue:
    """One after the other: `chain(bias(b), "gelu", residual(r))`; only the first may be gated.

    Raises:
      ValueError: another one is gated, or one is no epilogue.
    """
    links = [of("epilogues.chain", x) for x in (first, *others)]
    links = [x for x in links if x is not None]
    if any(x.gated for x in links[1:]):
        raise ValueError("epilogues.chain: only the first epilogue may be gated.")
    if not links:
        return Epilogue(_itself)
    steps = tuple((x.function, len(x.arrays)) for x in links)
    arrays = [array for x in links for array in x.arrays]
    return Epilogue(_Chain(steps, links[0].gated), *arrays, gated=links[0].gated)


NAMES: dict[str, Callable[[], Epilogue]] = dict(
    gelu=gelu, silu=silu, relu=relu, tanh=tanh, swiglu=swiglu, geglu=geglu
)


def of(op: str, given: Like) -> Epilogue | None:
    """What a caller gave as `epilogue=`, as an `Epilogue`.

    Raises:
      ValueError: an unknown name.
      TypeError: it is none of the forms.
    """
    if given is None or isinstance(given, Epilogue):
        return given
    if isinstance(given, str):
        if given not in NAMES:
            known = ", ".join(map(repr, NAMES))
            raise ValueError(f"{op}: epilogue={given!r} is not one of {known}.")
        return NAMES[given]()
    if isinstance(given, tuple) and given and callable(given[0]):
        function: Any = given[0]
        return Epilogue(function, *given[1:])
    if callable(given):
        return Epilogue(_recognised(given))
    raise TypeError(
        f"{op}: epilogue={given!r:.60} is of type {type(given).__name__}; pass a function, a name"
        " such as 'gelu', a tuple (function, *arrays), or a stretto.Epilogue."
    )


def is_gated(given: Like) -> bool:
    """Whether it makes one result of two products."""
    found = of("epilogue", given)
    return found is not None and found.gated


# --- Functions: the same objects at every call, so that programs are traced once ------------------


def _itself(product: jax.Array) -> jax.Array:
    return product


def _recognised(activation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function, as one that a kernel has a form of (`kernel_forms`) if it is such."""
    return _gelu if activation is jax.nn.gelu else activation


def _add(product: jax.Array, array: jax.Array) -> jax.Array:
    return product + array


def _times(product: jax.Array, array: jax.Array) -> jax.Array:
    return product * array


def _where(product: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep if keep.dtype == jnp.bool_ else keep != 0, product, 0)


@dataclasses.dataclass(frozen=True)
class _Biased:
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, product: jax.Array, bias: jax.Array) -> jax.Array:
        return self.activation(product + bias)

    @property
    def __name__(self) -> str:
        return f"{name_of(self.activation)} after a bias"


@dataclasses.dataclass(frozen=True)
class _Gated:
    activation: Callable[[jax.Array], jax.Array]
    gate_biased: bool
    up_biased: bool

    def __call__(self, gate: jax.Array, up: jax.Array, *biases: jax.Array) -> jax.Array:
        rest = list(biases)
        gate = gate + rest.pop(0) if self.gate_biased else gate
        up = up + rest.pop(0) if self.up_biased else up
        return self.activation(gate) * up

    @property
    def __name__(self) -> str:
        return f"{name_of(self.activation)} of the gate"


@dataclasses.dataclass(frozen=True)
class _Chain:
    steps: tuple[tuple[Callable[..., jax.Array], int], ...]
    gated: bool

    def __call__(self, *products_and_arrays: jax.Array) -> jax.Array:
        products = products_and_arrays[: 1 + self.gated]
        rest = products_and_arrays[1 + self.gated :]
        for function, count in self.steps:
            products = (function(*products, *rest[:count]),)
            rest = rest[count:]
        return products[0]

    @property
    def __name__(self) -> str:
        return ", ".join(name_of(function).lstrip("_") for function, _ in self.steps)


def _with_bias(activation: Callable[[jax.Array], jax.Array], bias: Any) -> Epilogue:
    return Epilogue(activation) if bias is None else Epilogue(_Biased(activation), bias)
