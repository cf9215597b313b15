"""The tables that a dispatch stores besides rows, each as its caller gets it.

Were they cut out of larger arrays, XLA would run a kernel for each cut, which takes longer to
launch than to run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int
from stretto.kernels.problem.routing import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableResults:
    """The tables in a kernel, as refs of int32 in global memory.

    Attributes:
      positions: `[entries]`, those of a token side by side (`Routing.positions`).
      group_sizes: `[e]`, of this device's experts.
      tokens_per_expert: `[num_experts]`.
      out_of_range: `[1]`.
      first_expert: of this device.
    """

    positions: Any
    group_sizes: Any
    tokens_per_expert: Any
    out_of_range: Any
    first_expert: Int

    @staticmethod
    def types(entries: int, num_experts: int, devices: int) -> list[jax.ShapeDtypeStruct]:
        """Of the refs, in their order."""
        sizes = entries, num_experts // devices, num_experts, 1
        return [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]

    def store_count(self, expert: Int, count: jax.Array) -> None:
        """Stores how many entries an expert has over all devices; past the last one, strays."""
        (own,), (experts,) = self.group_sizes.shape, self.tokens_per_expert.shape

        @pl.when(expert < experts)
        def _():
            self.tokens_per_expert[expert] = count

        @pl.when((expert >= self.first_expert) & (expert < self.first_expert + own))
        def _():
            self.group_sizes[expert - self.first_expert] = count

        @pl.when(expert == experts)
        def _():
            self.out_of_range[0] = count


def as_routing(found: list[jax.Array], shape: tuple[int, ...]) -> Routing:
    """The results of a kernel, of which no entry was dropped, for choices of such a shape."""
    positions, group_sizes, tokens_per_expert, out_of_range = found
    tokens, top_k = shape
    return Routing(
        positions=positions[: tokens * top_k].reshape(shape),
        group_sizes=group_sizes,
        tokens_per_expert=tokens_per_expert,
        dropped=jnp.int32(0),
        out_of_range=out_of_range.reshape(()),
    )
