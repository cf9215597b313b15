"""How a call over several nodes is cut up."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How an operation over several nodes is cut up; over one node, `kernel` alone counts.

    Attributes:
      pieces: that all that goes to other nodes, or comes from them, is cut into; at least one for
        each node. By default as many as leave a kernel enough to do (`nodes.MOST_PIECES`).
      kernel: the configuration of the fused kernel; chosen by default.
    """

    pieces: int | None = None
    kernel: Any = None

    def __post_init__(self) -> None:
        if self.pieces is not None and self.pieces < 1:
            raise ValueError(f"pieces={self.pieces} must be at least 1.")
