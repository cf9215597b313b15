"""The persistent, warp-specialised derivative of attention on Hopper GPUs.

A block has two warpgroups that derive, each with 64 keys of a tile, and one of single warps: one
loads and stores keys and values, and loads queries; one adds up the derivatives of queries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.kernels.engine.attention.derivative_parts import DerivativeParts
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.hopper.attention import derivative_memory
from stretto.kernels.engine.hopper.attention.derivative_config import (
    REGISTERS,
    WARPGROUPS,
    DerivativeTiles,
)
from stretto.kernels.engine.hopper.attention.derivative_memory import Memory
from stretto.kernels.engine.hopper.attention.derivative_moving import add, load
from stretto.kernels.engine.hopper.attention.deriving import derive
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Product, Ref


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The main loop; `config` must have been checked (`DerivativeTiles.check`).

    Attributes:
      config: how the derivative is cut up.
      product: the types of queries and keys, of values, and of the result: one 16-bit type.
      dim: the size of a head.
    """

    config: DerivativeTiles
    product: Product
    dim: int

    @property
    def warpgroups(self) -> int:
        """Those that derive."""
        return WARPGROUPS

    @property
    def warps(self) -> int:
        """One that loads, and one that adds."""
        return 2

    def scratch(self) -> dict[str, Any]:
        """Operands, results and the barriers."""
        return derivative_memory.scratch(self.dim, self.product.out)

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """Deriving, loading and adding.

        Raises:
          TypeError: the kernel's parts are not those of the derivative, or arrive.
        """
        parts, shared = block.parts, Memory.of(scratch)
        if not isinstance(parts, DerivativeParts) or gates is not None:
            raise TypeError(
                f"the derivative is made of DerivativeParts without an Arrival, not {parts}."
            )
        spare, deriving = REGISTERS
        return [
            Role(
                functools.partial(derive, block, parts, shared, turns=self.config.turns),
                warpgroups=WARPGROUPS,
                registers=deriving,
            ),
            Role(functools.partial(load, block, parts, shared), registers=spare),
            Role(functools.partial(add, block, parts, shared), registers=spare),
        ]
