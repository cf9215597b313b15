"""What memory does with a value that is not stored but combined with what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.state.arithmetic import (
    as_signed,
    as_unsigned,
    maximum,
    minimum,
)

type Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _on_bits(read: Callable[[np.ndarray], np.ndarray], combine: Combine) -> Combine:
    """`combine` of the bits of both, read as signed or as unsigned whatever their type says."""
    return lambda there, value: combine(read(there), read(value)).view(there.dtype)


def _increase(there: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(there >= limit, np.zeros_like(there), there + 1)


def _decrease(there: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((there == 0) | (there > limit), limit, there - 1)


REDUCTIONS: dict[str, Combine] = {
    "add": np.add,
    "min": minimum,
    "max": maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "umin": _on_bits(as_unsigned, np.minimum),
    "umax": _on_bits(as_unsigned, np.maximum),
    "smin": _on_bits(as_signed, np.minimum),
    "smax": _on_bits(as_signed, np.maximum),
    "inc": _on_bits(as_unsigned, _increase),
    "dec": _on_bits(as_unsigned, _decrease),
}
"""From what is there and the new value to what will be there, by the reduction's name."""

_WHOLE = ("int32", "int64", "uint32", "uint64")
# Which types a bulk copy reduces how: the table of `cp.reduce.async.bulk.tensor`, as Mosaic GPU
# has it (0.11.2).
_COPIED: dict[str, tuple[str, ...]] = {
    "add": ("bfloat16", "float16", "float32", *_WHOLE),
    **dict.fromkeys(("min", "max"), ("bfloat16", "float16")),
    **dict.fromkeys(("umin", "umax", "smin", "smax", "and", "or", "xor"), _WHOLE),
    **dict.fromkeys(("inc", "dec"), ("int32", "uint32")),
}


def check_copied(reduction: str, dtype: Any) -> None:
    """Refuses a reduction by bulk copies that Mosaic GPU refuses for the type.

    Raises:
      UnsupportedKernelError: says which types it takes.
    """
    name = np.dtype(dtype).name
    if name not in _COPIED.get(reduction, ()):
        types = ", ".join(_COPIED.get(reduction, ())) or "no type"
        hint = f"; take 's{reduction}' or 'u{reduction}'" if reduction in ("min", "max") else ""
        raise UnsupportedKernelError(
            f"reduction_op={reduction!r} of {name}: bulk copies reduce {types} so, and Mosaic GPU"
            f" refuses others{hint}"
        )
