"""NumPy's arrays as arguments of a public operation: taken as those of JAX that they become."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def takes_numpy_arrays[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, with NumPy's arrays among its arguments, also in tuples and lists, as arrays of JAX.

    So is its first one, an operand, if it is a number of NumPy's. These have the types that JAX
    computes with: without `jax_enable_x64` an array of float64 is one of float32. Otherwise checks
    and choices would be about types that no result has.

    Raises:
      ValueError: an array that JAX cannot hold: of objects, text or dates, of bytes in another
        order than the machine's, of masked elements.
    """
    places = tuple(inspect.signature(fun).parameters)
    op = f"fp8.{fun.__name__}" if ".fp8" in fun.__module__ else fun.__name__

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and isinstance(args[0], np.generic):
            args = jnp.asarray(args[0]), *args[1:]  # pyright: ignore[reportAssignmentType]
        # More arguments than places are for `fun` to refuse.
        given = [
            _converted(op, places[min(i, len(places) - 1)], value) for i, value in enumerate(args)
        ]
        named = {name: _converted(op, name, value) for name, value in kwargs.items()}
        return fun(*given, **named)  # pyright: ignore[reportCallIssue]

    return call


def _converted(op: str, name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError) as error:
            kind = "masked array" if isinstance(value, np.ma.MaskedArray) else "array"
            raise ValueError(
                f"{op}: {name} is NumPy's {kind} {value.dtype}{list(value.shape)}, which JAX cannot"
                f" hold; pass an array of numbers in this machine's order of bytes, without a mask."
            ) from error
    if type(value) in (tuple, list):
        return type(value)(_converted(op, name, each) for each in value)
    return value
