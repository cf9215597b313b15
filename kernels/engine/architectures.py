"""What each architecture has: its main loop, and the tiles that serve there.

The type of a configuration of tiles selects the architecture.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import stretto.kernels.engine.blackwell.matmul as blackwell
import stretto.kernels.engine.hopper.matmul as hopper
from stretto.kernels.engine.blackwell import tile_config as blackwell_tiles
from stretto.kernels.engine.hopper import tile_config as hopper_tiles
from stretto.kernels.engine.mainloop import Mainloop
from stretto.kernels.engine.parts import Product
from stretto.kernels.engine.shared_memory import row_elements
from stretto.kernels.engine.waves import Result
from stretto.kernels.problem.machine import BLACKWELL, HOPPER
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.scales import Granularity

TileConfig = hopper_tiles.TileConfig | blackwell_tiles.TileConfig


class Tiles(NamedTuple):
    """The tiles that kernels choose among.

    Attributes:
      large: for most problems.
      narrow, narrowest: for few rows: more multiprocessors have a tile, and more of rhs is on its
        way to each.
      adding: for results that are added up across devices, the likely ones first.
      adding_wide: for those of them in float32.
      adding_large: for other results that are added up, where `large` has no room for addends.
      adding_deep: the same with more stages, and narrower. None where an architecture has none.
      scattering: for results that are scattered, too: of the last wave blocks share the tiles.
      summing: likewise for those of an all-reduce.
      narrow_fills: whether `narrow` is chosen where it fills the multiprocessors best; it was timed
        in 16 bits alone.
      gathering: what all-gather matmuls choose among beside large ones.
      sharing: those of all matmuls where rows of rhs begin within a line of the L2: blocks load it
        together.
      tall, tall_adding: for many rows, which fill them: as `large`, and for results that are added
        up. On Blackwell two blocks make such a tile together, on Hopper three warpgroups. None
        where an architecture has none.
      tall_rows: the least rows that they are for.
    """

    large: TileConfig
    narrow: TileConfig
    narrowest: TileConfig
    adding: tuple[TileConfig, ...]
    adding_wide: TileConfig
    tall: TileConfig | None = None
    tall_adding: TileConfig | None = None
    tall_rows: int = 0
    adding_large: TileConfig | None = None
    adding_deep: TileConfig | None = None
    scattering: tuple[TileConfig, ...] = ()
    summing: tuple[TileConfig, ...] = ()
    narrow_fills: bool = True
    gathering: tuple[TileConfig, ...] = ()
    sharing: tuple[TileConfig, ...] = ()

    @property
    def large_ones(self) -> tuple[TileConfig, ...]:
        """What the tuner tries where there are many rows."""
        return (self.large,) if self.tall is None else (self.large, self.tall)

    def large_for(self, rows: int) -> TileConfig:
        """`tall` if `rows` fill its tiles, else `large`."""
        return self.tall if self.tall is not None and self._suits(self.tall, rows) else self.large

    def adding_for(self, result: Result, *, wide: bool, scattered: bool = False) -> TileConfig:
        """Those for results that are added up; `wide` are in float32, `scattered` no all-reduce's.

        Of an architecture with an `adding_deep`, whichever tiles fill the multiprocessors best.
        """
        if self.tall_adding is not None and self._suits(self.tall_adding, result.rows):
            return self.tall_adding
        # Addends in float32 do not fit into the registers of Hopper beside a tile of 256 columns.
        large = self.adding_wide if wide else self.adding_large or self.large
        if wide or self.adding_deep is None:
            return large
        narrow = (self.narrow,) if self.narrow_fills else ()
        scattering = self.scattering if scattered else ()
        sharing = self.sharing if result.rhs_within else ()
        return min(self.adding_deep, large, *narrow, *scattering, *sharing, key=result.time)

    def _suits(self, tall: TileConfig, rows: int) -> bool:
        return rows >= self.tall_rows and _fill(tall, rows)


def _fill(tile: TileConfig, rows: int) -> bool:
    """Whether tiles of so many rows are at most an eighth larger."""
    return 8 * (-(-rows // tile.tile_m) * tile.tile_m) <= 9 * rows


TILES = {
    HOPPER: Tiles(
        large=hopper_tiles.LARGE,
        narrow=hopper_tiles.NARROW,
        narrowest=hopper_tiles.NARROWEST,
        adding=(
            hopper_tiles.NARROW,
            hopper_tiles.LARGE,
            hopper_tiles.WIDE_RESULT,
            hopper_tiles.SHARED,
            hopper_tiles.SHARED_WIDE,
        ),
        adding_wide=hopper_tiles.WIDE_RESULT,
        adding_deep=hopper_tiles.WIDE_RESULT,
        scattering=(hopper_tiles.SHARED,),
        summing=(hopper_tiles.SHARED, hopper_tiles.SHARED_WIDE),
        gathering=(hopper_tiles.WIDE_RESULT, hopper_tiles.NARROW, hopper_tiles.NARROWEST),
        sharing=(hopper_tiles.PAIR, hopper_tiles.LARGE_PAIR),
    ),
    BLACKWELL: Tiles(
        large=blackwell_tiles.LARGE,
        narrow=blackwell_tiles.NARROW,
        narrowest=blackwell_tiles.NARROWEST,
        adding=(blackwell_tiles.ADDING, blackwell_tiles.LARGE, blackwell_tiles.PAIR_ADDING),
        adding_wide=blackwell_tiles.LARGE,
        tall=blackwell_tiles.PAIR,
        tall_adding=blackwell_tiles.PAIR_ADDING,
    ),
}


def _in_pairs(*, adding: TileConfig, tall_adding: TileConfig, **others: Any) -> Tiles:
    """Tiles of which `adding` serves all sums, and `tall_adding` those of many rows."""
    sums: dict[str, Any] = dict(adding_wide=adding, adding_large=adding, tall_adding=tall_adding)
    return Tiles(adding=(adding, tall_adding), **sums, **others)


SCALED: dict[str, dict[Granularity, Tiles]] = {
    HOPPER: {
        "row": Tiles(
            large=hopper_tiles.LARGE_FP8,
            narrow=hopper_tiles.NARROW_FP8,
            narrowest=hopper_tiles.NARROWEST_FP8,
            adding=(
                hopper_tiles.LARGE_FP8,
                hopper_tiles.WIDE_RESULT_FP8,
                hopper_tiles.NARROW_FP8,
                hopper_tiles.SHARED_FP8,
            ),
            adding_wide=hopper_tiles.WIDE_RESULT_FP8,
            adding_deep=hopper_tiles.WIDE_RESULT_FP8,
            scattering=(hopper_tiles.SHARED_FP8,),
            narrow_fills=False,
            gathering=(hopper_tiles.WIDE_RESULT_FP8, hopper_tiles.SHARED_FP8),
        ),
        "block": Tiles(
            large=hopper_tiles.BLOCKS,
            narrow=hopper_tiles.BLOCKS,
            narrowest=hopper_tiles.NARROW_BLOCKS,
            adding=(hopper_tiles.BLOCKS_BY_THREE, hopper_tiles.BLOCKS),
            adding_wide=hopper_tiles.BLOCKS,
            tall=hopper_tiles.BLOCKS_BY_THREE,
            tall_adding=hopper_tiles.BLOCKS_BY_THREE,
            tall_rows=2048,
        ),
    },
    BLACKWELL: {
        "row": _in_pairs(
            large=blackwell_tiles.LARGE_FP8,
            narrow=blackwell_tiles.NARROW_FP8,
            narrowest=blackwell_tiles.NARROWEST_FP8,
            adding=blackwell_tiles.ADDING_FP8,
            tall=blackwell_tiles.PAIR_FP8,
            tall_adding=blackwell_tiles.PAIR_ADDING_FP8,
        ),
        "block": _in_pairs(
            large=blackwell_tiles.BLOCKS,
            narrow=blackwell_tiles.BLOCKS,
            narrowest=blackwell_tiles.NARROW_BLOCKS,
            adding=blackwell_tiles.ADDING_BLOCKS,
            tall=blackwell_tiles.PAIR_BLOCKS,
            tall_adding=blackwell_tiles.PAIR_ADDING_BLOCKS,
        ),
        "mx": _in_pairs(
            large=blackwell_tiles.BLOCKS,
            narrow=blackwell_tiles.BLOCKS,
            narrowest=blackwell_tiles.BLOCKS,
            adding=blackwell_tiles.ADDING_BLOCKS,
            tall=blackwell_tiles.PAIR_BLOCKS,
            tall_adding=blackwell_tiles.PAIR_ADDING_BLOCKS,
        ),
    },
}
"""Of operands in 8 bits, by the granularity of their scales; of "mx" on Blackwell alone."""

LARGE_SCALED: dict[str, dict[Granularity, TileConfig]] = {
    architecture: {granularity: tiles.large for granularity, tiles in of_scales.items()}
    for architecture, of_scales in SCALED.items()
}
"""The same of `local_matmul`."""


def tiles_for(problem: Problem | None) -> Tiles:
    """Those of the architecture that a problem is on; Hopper's without one, or on another."""
    architecture = HOPPER if problem is None else problem.machine.architecture
    if problem is not None and problem.types.scales is not None:
        of_scales = SCALED.get(architecture, SCALED[HOPPER])
        # Where tensor cores apply none, kernels say so before their tiles are looked at.
        return of_scales.get(problem.types.scales, of_scales["block"])
    return TILES.get(architecture, TILES[HOPPER])


def check_tiles(tiles: TileConfig, problem: Problem) -> None:
    """Checks that tiles can be built, and are for the architecture that `problem` is on.

    Raises:
      ValueError: they are not.
    """
    asked = problem.machine.architecture
    if asked in TILES and tiles.architecture != asked:
        wanted = type(TILES[asked].large)
        raise ValueError(
            f"tiles={tiles!r:.60} are for {tiles.architecture}, and {problem.machine.kind} is"
            f" {asked}; pass a {wanted.__module__}.{wanted.__qualname__}, or no config."
        )
    tiles.check()
    row = row_elements(problem.types.lhs)
    if asked in TILES and tiles.tile_k != row:
        raise ValueError(
            f"tile_k={tiles.tile_k} must be {row} for {problem.types.lhs}: one row of the 128 byte"
            " swizzle."
        )
    if problem.types.scales == "block":
        tiles.check_blocks()
    if problem.types.scales == "mx":
        tiles.check_mx()


def scales_bytes(tiles: TileConfig, problem: Problem) -> int:
    """Shared memory of the scales of a problem's operands, in bytes."""
    return tiles.scales_bytes(problem.types.scales)


def mainloop_of(config: Any, product: Product) -> Mainloop:
    """The main loop of `config`, whose type selects the architecture.

    Raises:
      NotImplementedError: there is no main loop for the configuration, or none with the product's
        fold.
    """
    if isinstance(config, hopper_tiles.TileConfig):
        return hopper.Matmul(config, product)
    if isinstance(config, blackwell_tiles.TileConfig):
        return blackwell.Matmul(config, product)
    raise NotImplementedError(
        f"tiles={config!r} are for no main loop that is built; pass a TileConfig of"
        " stretto.kernels.engine.hopper or of stretto.kernels.engine.blackwell."
    )
