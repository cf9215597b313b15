"""How a call over several nodes is cut up."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of an operation over several nodes; over one node, only `kernel` counts.

    Attributes:
      pieces: into which all traffic with other nodes is divided; at least one for
        each node. By default so many that each kernel has enough work (`nodes.MOST_PIECES`).
      kernel: the configuration of the fused kernel; chosen by default.
    """

    pieces: int | None = None
    kernel: Any = None

    def __post_init__(self) -> None:
        if self.pieces is not None and self.pieces < 1:
            raise ValueError(f"pieces={self.pieces} must be at least 1.")
