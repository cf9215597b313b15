"""The persistent, warp-specialised attention of Hopper GPUs.

A block has two or three warpgroups that attend, each with 64 queries of a tile, and one of single
warps: one loads queries, keys and values, one stores results, and the others are `fuse`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.kernels.engine.attention.parts import AttentionParts
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.hopper.attention import memory
from stretto.kernels.engine.hopper.attention.attending import attend
from stretto.kernels.engine.hopper.attention.config import REGISTERS, AttentionTiles
from stretto.kernels.engine.hopper.attention.memory import Memory
from stretto.kernels.engine.hopper.attention.moving import load, store
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Product, Ref


@dataclasses.dataclass(frozen=True)
class Attention:
    """The main loop; `config` must have been checked (`AttentionTiles.check`).

    Attributes:
      config: how attention is cut up.
      product: the types of queries and keys, of values, and of the result: one 16-bit type.
      dim: the size of a head.
    """

    config: AttentionTiles
    product: Product
    dim: int

    @property
    def warpgroups(self) -> int:
        """Those that attend."""
        return self.config.warpgroups

    @property
    def warps(self) -> int:
        """One that loads, and one that stores."""
        return 2

    def scratch(self) -> dict[str, Any]:
        """Queries, keys, values, results and the barriers."""
        return memory.scratch(self.config, self.dim, self.product.out)

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """Attending, loading and storing.

        Raises:
          TypeError: the kernel's parts are not those of attention.
        """
        parts, shared = block.parts, Memory.of(scratch)
        if not isinstance(parts, AttentionParts):
            raise TypeError(f"attention is made of AttentionParts, not {type(parts).__name__}.")
        spare, attending = REGISTERS[self.config.warpgroups]
        return [
            Role(
                functools.partial(attend, block, parts, shared),
                warpgroups=self.warpgroups,
                registers=attending,
            ),
            Role(functools.partial(load, block, parts, gates, shared), registers=spare),
            Role(functools.partial(store, block, parts, shared), registers=spare),
        ]
