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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import block_in_cluster
from stretto.distributed.schedule import Int
from stretto.kernels.engine import ring
from stretto.kernels.engine.blackwell import accumulators, adding, mx, pieces, scaling
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.adding import Adding
from stretto.kernels.engine.blackwell.draining import Summed, Totals, drain
from stretto.kernels.engine.blackwell.multiplying import multiply
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.blackwell.scaling import ScaledByStage, ScaledByTile
from stretto.kernels.engine.blackwell.tile_config import LANES, TileConfig
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.loading import load
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Addends, Fold, Product, Ref, Sum, Tile
from stretto.kernels.engine.ring import Ring, RingScales, StageScales
from stretto.kernels.engine.storing import store

# Registers of a thread that (drains, does anything else) where totals are added up in registers.
REGISTERS = 232, 136
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
            **ring.scratch(
                config, config.num_stages, product, empty, copies=4 if product.scales == "mx" else 2
            ),
            **scaling.scratch(config, product),
            **mx.scratch(config, product),
            **accumulators.scratch(config),
            **pieces.scratch(config, product),
            **(adding.scratch(product) if product.fold is Addends else {}),
        }

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """Draining, loading, issuing and storing, and bringing addends."""
        stages = Ring(
            lhs=scratch["lhs_smem"],
            rhs=scratch["rhs_smem"],
            full=scratch["full"],
            empty=scratch["empty"],
            scales=self._stage_scales(scratch),
            halved=self._halved(),
        )
        halves = Accumulators(
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
        totals = self._totals(block, halves, buffers, stages, scratch)
        of_tile = self._load_of_tile(block, halves, scratch)
        draining, spare = REGISTERS if self.product.scales == "block" else (None, None)
        roles = [
            Role(functools.partial(drain, block, totals, buffers, addends), 1, draining),
            Role(functools.partial(load, block, gates, stages, of_tile), registers=spare),
            Role(functools.partial(multiply, block, self.product, stages, halves)),
            Role(functools.partial(store, block, buffers)),
        ]
        return roles if addends is None else [*roles, Role(addends.bring)]

    def _stage_scales(self, scratch: Mapping[str, Ref]) -> StageScales | None:
        """Scales that come with each stage."""
        match self.product.scales:
            case "block":
                return scaling.ring_scales(scratch)
            case "mx":
                return mx.of(self.config, scratch)
        return None

    def _totals(
        self,
        block: Block,
        halves: Accumulators,
        buffers: Pieces,
        stages: Ring,
        scratch: Mapping[str, Ref],
    ) -> Totals:
        """What makes totals out of the accumulators."""
        if isinstance(stages.scales, RingScales):
            return ScaledByStage(
                block=block,
                accumulators=halves,
                pieces=buffers,
                ring=stages,
                scales=stages.scales,
            )
        if self.product.scales == "row":
            scales = scaling.tile_scales(scratch)
            return ScaledByTile(block=block, accumulators=halves, pieces=buffers, scales=scales)
        return Summed(block=block, accumulators=halves, pieces=buffers)

    def _load_of_tile(
        self, block: Block, halves: Accumulators, scratch: Mapping[str, Ref]
    ) -> Callable[[Int, Tile], None] | None:
        """What the loading warp loads once a tile: scales of rows and columns, or nothing."""
        scales = block.parts.scales
        if self.product.scales != "row" or scales is None:
            return None
        return lambda i, tile: scaling.tile_scales(scratch).load(halves.of(i), scales, tile)

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
