"""Ways of kernels that are built, and off until they were measured: asked for to compare times.

    with trials.asked(lag=2):
        program = jax.jit(f).lower(*operands)

Programs that are traced inside have them, where their kernels can.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What is tried.

    Attributes:
      lag: stages that the second multiplying warpgroup of Hopper's matmul is behind the first at
        the end of a tile, where the contraction does not fit into the ring (`hopper/lagging`).
      paced: pieces of an epilogue's matrix are loaded along a long contraction, in place of at its
        beginning (`hopper/applying`).
      adds_residual: a matmul reduce-scatter adds an array of the epilogue that is as large as the
        result as one more addend, in place of XLA after it.
    """

    lag: int = 0
    paced: bool = False
    adds_residual: bool = False

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise ValueError(f"lag={self.lag} must be at least 0.")


_current: contextvars.ContextVar[Trials] = contextvars.ContextVar("trials", default=Trials())  # noqa: B039


def current() -> Trials:
    """What is tried in what is traced now."""
    return _current.get()


@contextlib.contextmanager
def asked(**given: Any) -> Iterator[None]:
    """Tries `given`, fields of `Trials`, in what is traced inside."""
    token = _current.set(Trials(**given))
    try:
        yield
    finally:
        _current.reset(token)
