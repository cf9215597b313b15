"""What a call of `context_parallel_attention` is given: operands, options and a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.attention.layouts import Span
from stretto.kernels.attention.masks import Mask
from stretto.kernels.operation import Axes
from stretto.kernels.problem.problem import Problem


class Operands(NamedTuple):
    """The arguments of the public function; segments are None where there are no documents."""

    q: Any
    k: Any
    v: Any
    segments: Any = None
    kv_segments: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a call.

    Attributes:
      method: "gather", "heads" or "fused".
      layout: of the tokens.
      mask, scale: of the scores.
      by_cudnn: whether cuDNN serves on a device; if not, `jax.lax`. Of "fused" the backward pass.
      logsumexp: whether it is returned as well.
      moves: the caller's `backend`, for moving arrays.
      copies: for method "heads": how often each head of keys is sent.
    """

    method: str
    layout: str
    mask: Mask
    scale: float
    by_cudnn: bool
    logsumexp: bool
    moves: str
    copies: int = 1

    def span(self, axes: Axes) -> Span:
        """Which tokens this device holds."""
        return Span(self.layout, axis_size(axes), lax.axis_index(axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How keys and values are gathered.

    Attributes:
      by_peer: peer by peer, with a call of attention for each peer; if not, by one `all_gather`,
        with one call for all keys.
    """

    by_peer: bool = True

    def check(self, problem: Problem | None = None) -> None:
        """Raises nothing: every problem can be served."""
