"""A function to time, with the operands that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from stretto.benchmarks.cases.meshes import joined
from stretto.kernels.operation import Operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One function to time.

    Attributes:
      body: maps operands to an array, or to a tree of some.
      operands: of one device.
      manual: whether `body` is called inside `shard_map`, on each device's operands; if not, on
        global arrays, for XLA to partition.
      joins: for each operand, the dimension along which the devices' arrays join into the global
        one; the first by default.
      out_joins: the same for the result.
      compiler_options: XLA's flags for this program only.
      config: what the result records as the configuration.
    """

    body: Callable[..., jax.Array]
    operands: tuple[Operand, ...]
    manual: bool = True
    joins: tuple[int, ...] = ()
    out_joins: int = 0
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str = ""

    def specs(self, mesh: Mesh) -> tuple[PartitionSpec, ...]:
        """The sharding of every operand."""
        return tuple(joined(mesh, dimension) for dimension in self.dimensions)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """`joins`, one for every operand."""
        return self.joins or (0,) * len(self.operands)
