"""What a call is, as far as the choice of its implementation depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.scales import Granularity


class Types(NamedTuple):
    """Element types, by JAX's names; of a collective's one operand that is `lhs`.

    `scales` is the granularity of scales, which are in float32.
    """

    lhs: str
    out: str
    rhs: str | None = None
    scales: Granularity | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element of `lhs`."""
        return jnp.dtype(self.lhs).itemsize

    @property
    def measured_out_itemsize(self) -> int:
        """Bytes of an element of the results that tuned tables were measured with."""
        return 2 if self.scales is not None else self.itemsize

    @property
    def out_itemsize(self) -> int:
        """Bytes of an element of the result."""
        return jnp.dtype(self.out).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation.

    Attributes:
      operation: its name.
      sizes: by name, of the whole problem over all devices: `m`, `k` and `n` of a matmul; for a
        collective `m` rows of one device's operand, of `n` elements each.
      types: of the elements.
      devices: the team's size.
      machine: what the team's devices are.
      copied: bytes that XLA has to put in order for a kernel, as of a batch; 0 for most calls.
      applied: bytes of the results of a kernel that XLA reads and writes once more, for an epilogue
        that no kernel holds.
    """

    operation: str
    sizes: Mapping[str, int]
    types: Types
    devices: int
    machine: Machine
    copied: int = 0
    applied: int = 0

    def resized(self, **sizes: int) -> Problem:
        """The same problem with some other sizes."""
        return dataclasses.replace(self, sizes={**self.sizes, **sizes})

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes.values()))
        return f"{self.operation} {sizes} {self.types.lhs} on {self.devices} x {self.machine.kind}"
