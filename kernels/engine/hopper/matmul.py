"""The persistent, warp-specialised matmul of Hopper GPUs, which all kernels share.

A block has three warpgroups. Two multiply: each holds half the rows of a tile in its accumulator.
Of the third one warp loads tiles of lhs and rhs into a ring of `num_stages` stages of shared memory
(`ring`), and one stores finished tiles (`pieces`); the others are `fuse`'s. While a multiplying
warpgroup signals or waits for a semaphore its tensor cores idle, and where it does the latter the
assembler serialises them (ptxas, C7520), so both are for the third.

For tiles of 192 rows (`TileConfig.warpgroups`) there are four, of which three multiply a third
each; what is said of two, and of halves of a tile, is of three then.

Two blocks of a cluster may make a tile together (`TileConfig.blocks`), half of its rows each. What
is said of a tile's rows is of the block's then. Each loads half of rhs, and the copy engine writes
it to the shared memory of both, so that two thirds of the bytes leave the L2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS
from stretto.distributed.schedule import Int
from stretto.kernels.engine import ring
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.hopper import adding, applying, late, pieces, scaling
from stretto.kernels.engine.hopper.adding import Adding
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.folding import Folding, Summing
from stretto.kernels.engine.hopper.multiplying import make_tiles, multiply
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.products import Products, first_row
from stretto.kernels.engine.hopper.scaling import ScaledByStage, ScaledByTile, TileScales
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.loading import load
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Addends, Fold, Product, Ref, Sum, Tile
from stretto.kernels.engine.ring import Ring, RingScales
from stretto.kernels.engine.storing import store

# Registers of a thread that (loads or stores, multiplies); evenly shared they would be 168.
REGISTERS: dict[type[Fold], tuple[int, int]] = {
    Sum: (40, 232),
    Addends: (56, 224),  # A storing warp that brings addends has more to remember.
}
# The same where three multiply; evenly shared they would be 128.
OF_FOUR: dict[type[Fold], tuple[int, int]] = {Sum: (32, 160), Addends: (32, 160)}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The main loop; `config` must have been checked (`TileConfig.check`).

    Raises:
      NotImplementedError: a fold that it does not have, or an epilogue with arrays beside a fold or
        scales that it is not built for.
    """

    config: TileConfig
    product: Product

    def __post_init__(self) -> None:
        if self.product.fold not in self.registers:
            known = ", ".join(fold.__name__ for fold in self.registers)
            raise NotImplementedError(
                f"the main loop {type(self).__name__} has no fold {self.product.fold.__name__}; it"
                f" has {known}."
            )
        product = self.product
        beside = product.beside
        others = product.fold is not Sum or product.scales not in (None, "row")
        # Pieces of a matrix are loaded whole, to buffers from which they may be stored in part.
        whole = product.ragged or product.scales is not None
        if beside is not None and (others or (whole and beside.has_matrix)):
            raise NotImplementedError(
                "an epilogue with arrays, or of two products, is built for plain sums, scaled by"
                " rows and columns at most, and without a matrix for ragged or scaled ones, and the"
                f" product is {product}."
            )

    @property
    def registers(self) -> Mapping[type[Fold], tuple[int, int]]:
        """The folds that it has, and the registers that loading and multiplying need for them."""
        return REGISTERS if self.config.warpgroups == 2 else OF_FOUR

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.config.warpgroups

    @property
    def warps(self) -> int:
        """One that loads, and one that stores."""
        return 2

    def scratch(self) -> dict[str, Any]:
        """The ring, the buffers of the store and the barriers."""
        return {
            **ring.scratch(
                self.config,
                self.config.num_stages,
                self.product,
                empty=self._empty(),
                copies=4 if self.product.scales == "block" else 2,
                shares_rhs=self._is_pair,
            ),
            **pieces.scratch(self.config, self.product),
            **(scaling.scratch(self.config, self.product) if self.product.scales == "row" else {}),
            **(adding.scratch(self.config) if self.product.fold is Addends else {}),
            **(
                {}
                if self.product.beside is None
                else applying.scratch(self.config, self.product.beside, self.result_columns)
            ),
        }

    @property
    def _is_pair(self) -> bool:
        return self.config.blocks > 1

    def _empty(self) -> Any:
        """The barriers of that name of the ring: in a pair the warpgroups of both blocks arrive."""
        arrivals, stages = self.config.warpgroups, self.config.num_stages
        if self._is_pair:
            return plgpu.ClusterBarrier(
                collective_axes=(CLUSTER_AXIS,), num_arrivals=arrivals, num_barriers=stages
            )
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)

    @property
    def result_columns(self) -> int:
        """Columns of a tile of the result: of a pair of products half as many as the tile has."""
        beside = self.product.beside
        return self.config.tile_n // (2 if beside is not None and beside.gated else 1)

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Ref]
    ) -> Sequence[Role]:
        """Multiplying, loading and storing."""
        blocks = self.product.scales == "block"
        stages = Ring.of(
            self.product,
            scratch,
            scales=RingScales(
                scratch["lhs_scales_smem"], scratch["rhs_scales_smem"], scratch["full"]
            )
            if blocks
            else None,
            halved=(int(self.product.lhs_transposed), 0) if self._is_pair else None,
            shares_rhs=self._is_pair,
        )
        out, stored, edge = pieces.views(scratch["out_smem"], self.product)
        buffers = Pieces(
            config=self.config,
            row=first_row(self.config),
            width=self.result_columns,
            out=out,
            stored=stored,
            edge=edge,
            filled=scratch["filled"],
            free=scratch["free"],
        )
        products = Products(config=self.config, product=self.product, ring=stages)
        folding = self.folding(block, products, buffers, scratch)
        spare, multiplying = self.registers[self.product.fold]
        of_tile = self._load_of_tile(block, scratch)
        beside = self._applying(block, buffers, scratch)
        of_stage = refill = None
        if beside is not None:
            of_tile = _both(of_tile, beside.load_of_tile)
            of_stage = beside.load_of_stage if beside.pace else None
            refill = beside.load_piece if beside.beside.has_matrix and not beside.pace else None
        if isinstance(folding, Adding):
            refill = folding.bring_last
        make = functools.partial(make_tiles, block, buffers, folding, beside)
        if late.is_possible(self.product, block, buffers):
            make = functools.partial(late.make_tiles, block, buffers, folding)
        return [
            Role(
                functools.partial(multiply, stages, make),
                warpgroups=self.config.warpgroups,
                registers=multiplying,
            ),
            Role(functools.partial(load, block, gates, stages, of_tile, of_stage), registers=spare),
            Role(functools.partial(store, block, buffers, folding.bring, refill), registers=spare),
        ]

    def folding(
        self, block: Block, products: Products, buffers: Pieces, scratch: Mapping[str, Ref]
    ) -> Folding:
        """What makes totals; a main loop of another arithmetic differs from this one here."""
        fold, scaled = block.parts.fold, self._scaling(block, products, scratch)
        if isinstance(fold, Addends):
            return Adding(
                block=block,
                products=products,
                pieces=buffers,
                addends=fold,
                loaded=scratch["loaded"],
                added=scratch["added"],
                scaling=scaled,
            )
        return scaled or Summing(block=block, products=products)

    def _scaling(
        self, block: Block, products: Products, scratch: Mapping[str, Ref]
    ) -> Folding | None:
        """What makes totals of products with scales; None where there are none."""
        if self.product.scales == "block":
            return ScaledByStage(block=block, products=products)
        if self.product.scales == "row":
            return ScaledByTile(block=block, products=products, scales=_tile_scales(scratch))
        return None

    def _applying(
        self, block: Block, buffers: Pieces, scratch: Mapping[str, Ref]
    ) -> Applying | None:
        """What applies an epilogue that takes more than the total; None where there is none."""
        if self.product.beside is None:
            return None
        return applying.applying(self.product.beside, block.parts, buffers, scratch)

    def _load_of_tile(
        self, block: Block, scratch: Mapping[str, Ref]
    ) -> Callable[[Int, Tile], None] | None:
        """What the loading warp loads once a tile: scales of rows and columns, or nothing."""
        scales = block.parts.scales
        if self.product.scales != "row" or scales is None:
            return None
        return functools.partial(_tile_scales(scratch).load, scales)


def _both(
    first: Callable[[Int, Tile], None] | None, second: Callable[[Int, Tile], None]
) -> Callable[[Int, Tile], None]:
    """What does both, or the second if there is no first."""
    if first is None:
        return second

    def run(i: Int, tile: Tile) -> None:
        first(i, tile)
        second(i, tile)

    return run


def _tile_scales(scratch: Mapping[str, Ref]) -> TileScales:
    return TileScales(
        rows=scratch["row_scales_smem"],
        columns=scratch["column_scales_smem"],
        full=scratch["scales_full"],
        empty=scratch["scales_empty"],
    )
