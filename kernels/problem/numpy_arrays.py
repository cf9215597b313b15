"""NumPy's arrays as arguments of a public operation: taken as those of JAX that they become."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def takes_numpy_arrays[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, with NumPy's arrays among its arguments, also in tuples and lists, as arrays of JAX.

    So is its first one, an operand, if it is a number of NumPy's. These have the types that JAX
    computes with: without `jax_enable_x64` an array of float64 is one of float32. Otherwise checks
    and choices would be about types that no result has.
    """

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and isinstance(args[0], np.generic):
            args = jnp.asarray(args[0]), *args[1:]  # pyright: ignore[reportAssignmentType]
        named = {name: _converted(value) for name, value in kwargs.items()}
        return fun(*map(_converted, args), **named)  # pyright: ignore[reportCallIssue]

    return call


def _converted(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if type(value) in (tuple, list):
        return type(value)(map(_converted, value))
    return value
