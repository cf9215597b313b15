"""The persistent, warp-specialised matmul of Blackwell GPUs; it was never run on one.

The tensor cores add up in tensor memory, which has two accumulators of 128 rows. One warpgroup
takes totals out of it (`draining`) while the next are made. Of the single warps one loads tiles of
lhs and rhs into a ring of `num_stages` stages of shared memory (`ring`), one issues their products
(`multiplying`), one stores finished tiles (`storing`), and one brings addends where there are any
(`adding`).

Two blocks of a cluster may make a tile of 256 rows together (`TileConfig.blocks`). Each then does
all of this for its own half of the rows, but that the first one's warp issues the products of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import block_in_cluster
from stretto.kernels.engine import ring
from stretto.kernels.engine.blackwell import accumulators, adding, pieces
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.adding import Adding
from stretto.kernels.engine.blackwell.draining import drain
from stretto.kernels.engine.blackwell.multiplying import multiply
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.blackwell.tile_config import LANES, TileConfig
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.loading import load
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Addends, Fold, Product, Ref, Sum
from stretto.kernels.engine.ring import Ring
from stretto.kernels.engine.storing import store

FOLDS: tuple[type[Fold], ...] = (Sum, Addends)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The main loop; `config` must have been checked (`TileConfig.check`).

    Raises:
      NotImplementedError: a fold that it does not have.
    """

    config: TileConfig
    product: Product

    def __post_init__(self) -> None:
        if self.product.fold not in FOLDS:
            known = ", ".join(fold.__name__ for fold in FOLDS)
            raise NotImplementedError(
                f"the main loop of Blackwell has no fold {self.product.fold.__name__}; it has"
                f" {known}."
            )

    @property
    def warpgroups(self) -> int:
        """One, which drains."""
        return 1

    @property
    def warps(self) -> int:
        """Loading, issuing and storing, and one that brings addends."""
        return 3 + (self.product.fold is Addends)

    def scratch(self) -> dict[str, Any]:
        """The ring, the accumulators, the buffers of the store and the barriers."""
        config, product = self.config, self.product
        empty = plgpu.Barrier(num_barriers=config.num_stages, orders_tensor_core=True)
        return {
            **ring.scratch(config, config.num_stages, product, empty),
            **accumulators.scratch(config),
            **pieces.scratch(config, product),
            **(adding.scratch(product) if product.fold is Addends else {}),
        }

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """Draining, loading, issuing and storing, and bringing addends."""
        stages = Ring.of(self.product, scratch, halved=self._halved())
        totals = Accumulators(
            config=self.config,
            totals=scratch["totals"],
            made=scratch["made"],
            drained=scratch["drained"],
        )
        out = scratch["out_smem"]
        out, edge = out if self.product.ragged else (out, None)
        buffers = Pieces(
            config=self.config,
            row=0 if self.config.blocks == 1 else block_in_cluster() * LANES,
            out=out,
            edge=edge,
            filled=scratch["filled"],
            free=scratch["free"],
        )
        addends = self._adding(block, buffers, scratch)
        roles = [
            Role(functools.partial(drain, block, totals, buffers, addends), warpgroups=1),
            Role(functools.partial(load, block, gates, stages)),
            Role(functools.partial(multiply, block, self.product, stages, totals)),
            Role(functools.partial(store, block, buffers)),
        ]
        return roles if addends is None else [*roles, Role(addends.bring)]

    def _halved(self) -> tuple[int, int] | None:
        """The axes of the tiles of lhs and rhs of which each block of a pair loads half."""
        if self.config.blocks == 1:
            return None
        return int(self.product.lhs_transposed), int(not self.product.rhs_transposed)

    def _adding(self, block: Block, buffers: Pieces, scratch: Mapping[str, Ref]) -> Adding | None:
        fold = block.parts.fold
        if not isinstance(fold, Addends):
            return None
        return Adding(
            block=block,
            pieces=buffers,
            addends=fold,
            buffers=scratch["addend_smem"],
            loaded=scratch["loaded"],
            added=scratch["added"],
        )
