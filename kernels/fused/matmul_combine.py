"""The grouped matmul of rows in their experts, overlapped with the combine: sums go to the tokens' owners.

The product is made in bands of columns: all rows of the first columns of tiles, then all rows of the next. So
once a band is finished, all tokens can be summed in its columns, while the next band is multiplied. One
warpgroup of every block makes the sums (`collectives/token_sums.py`, which has the rest of the protocol),
walking through the tokens once for each piece of a row. What is left after the last product are the
sums of the last band.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `product` | the storing warps | | | rows of the product |
| `finished[n]` | each storing warp, per tile | the summing warpgroups, for pieces of these columns | row tiles | column `n` of tiles is in place |
| `inbox[d]` | device `d` | | | its sums |
| `released` | the peers' summing warpgroups, once each | block 0's summing warpgroup | blocks x peers | all of `inbox` is in place, and no peer reads this device's tables any more |

Rows of no expert are neither multiplied nor stored. Sums are the same as those of `expert_combine`,
in the same order, and have the same bits.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import residency, schedule
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives.summing import Summing
from stretto.kernels.collectives.token_sums import Sums, added_up
from stretto.kernels.collectives.token_tables import Chunks, table_bytes
from stretto.kernels.engine import padding, streams
from stretto.kernels.engine.architectures import TileConfig, check_tiles, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.orders import BandsOrder
from stretto.kernels.engine.parts import Parts, Product, Ref, Sink, Tile, Transfer
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.fused.cut_rows import STORED_COLUMNS, cut
from stretto.kernels.fused.group_tables import ALIGNED, row_tiles
from stretto.kernels.fused.grouped_matmul import GroupedRows
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import NONE

NARROWER = dataclasses.replace(tile_config.WIDE_RESULT, num_stages=3)
"""In a block of four warpgroups a thread has 128 registers at the start, and the assembler refuses
products of 256 columns, which take 154. Three stages leave 58 KB of shared memory for rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up.

    Attributes:
      tiles: of the matmul.
      band: columns of tiles that are finished before the next ones.
      chunk: tokens whose tables are read at once; a multiple of 8.
      stages: sums of a block whose rows are on their way at once, where they fit.
      registers: of each thread that sums.
    """

    tiles: TileConfig = NARROWER
    band: int = 3
    chunk: int = 32
    stages: int = 6
    registers: int = 56

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        self.tiles.check()
        if problem is not None and problem.types.itemsize == 2:  # Others are made in two steps.
            check_tiles(self.tiles, problem)
        if self.tiles.tile_n > 192:
            raise ValueError(
                f"tile_n={self.tiles.tile_n} must be 192 at most, beside a warpgroup more."
            )
        if self.band < 1:
            raise ValueError(f"band={self.band} must be at least 1.")
        if self.chunk % 8 or not 8 <= self.chunk <= 256:
            raise ValueError(f"chunk={self.chunk} must be a multiple of 8 from 8 to 256.")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages} must be between 2 and 8.")
        if self.registers % 8 or not 24 <= self.registers <= 104:
            raise ValueError(f"registers={self.registers} must be a multiple of 8 from 24 to 104.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        if problem is not None and problem.machine.architecture != HOPPER:
            return
        for band in (3, 2, 6):
            yield Config(band=band)
        four_stages = dataclasses.replace(tile_config.WIDE_RESULT, store_buffers=1)
        yield Config(tiles=four_stages)


def _stages(width: int, top_k: int, config: Config) -> int:
    """Sums whose rows have room in shared memory at once, beside the matmul."""
    found = cut(width)
    if found is None:
        return 0
    row, piece = found
    elements = piece.padded * row.columns
    tables = 2 * table_bytes(config.chunk, top_k)
    used = config.tiles.smem_bytes(2) + tables + 2 * 4 * elements
    return min(config.stages, (SMEM_BYTES - used) // (top_k * elements * 2))


def obstacle(lhs: jax.Array, width: int, top_k: int, config: Config) -> str | None:
    """Why the kernel does not make a product of rows like `lhs`, `width` wide; None if it does."""
    if lhs.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {lhs.dtype}."
    rows = lhs.shape[0]
    if rows % ALIGNED or rows < 2 * ALIGNED or 0 in (*lhs.shape, top_k):
        return f"room for {rows} rows is no multiple of {ALIGNED}, or there is nothing to do."
    if width < 2 * STORED_COLUMNS or cut(width) is None:
        return f"rows of d={width} are no multiple of {STORED_COLUMNS}, or just one."
    if top_k > 16 or _stages(width, top_k, config) < 2:
        return f"top_k={top_k} rows for each of two sums do not fit into the shared memory."
    return None


def matmul_combine(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    team: Team,
    *,
    wire_dtype: Any,
    config: Config,
    rhs_transposed: bool,
    interpret: Any,
) -> jax.Array:
    """`[r, k]`, `[e, k, d]` (transposed `[e, d, k]`) -> weighted sums of a token's rows, `[tokens, d]`.

    Args:
      lhs: rows in the order of the experts; of several their products are added up.
      rhs: a matrix for each expert; as many as `lhs`, of one shape.
      sizes: int32 `[e]`, rows of each expert.
      weights: float32 `[tokens, top_k]`, of the device's own tokens.
      positions: int32 `[tokens, top_k]`, `Routing.positions`.
      team: the devices.
      wire_dtype: of the sums that cross between devices.
      config: of the kernel; it must serve (`obstacle`).
      rhs_transposed: how rhs is given.
      interpret: as `fuse` takes it.
    """  # noqa: E501
    tiles, (tokens, top_k) = config.tiles, positions.shape
    width = rhs[0].shape[1 if rhs_transposed else 2]
    found = cut(width)
    if found is None:
        raise ValueError(f"rows of {width} {lhs[0].dtype} cannot be summed.")  # `obstacle` says so.
    row, piece = found
    lhs = [padding.pad_to_tiles(x, padding.ROWS) for x in lhs]
    rhs = [padding.pad_to_tiles(x, padding.COLUMNS) for x in rhs]
    rows, dtype = len(lhs[0]), lhs[0].dtype
    grouped = GroupedRows.of(rows, rhs[0], tiles, rhs_transposed)
    blocks = residency.num_blocks_for(grouped.num_tiles, tiles.blocks)
    chunks = Chunks.of(team, tokens, config.chunk, blocks)
    table = chunks.table(positions.shape[1])
    how = Summing(
        row=row,
        piece=piece,
        top_k=top_k,
        stages=max(2, min(_stages(width, top_k, config), chunks.tokens)),
        chunks=dataclasses.replace(chunks, num_blocks=blocks, rounds=row.parts // piece.parts),
        dtype=dtype,
        wire_dtype=wire_dtype,
    )
    shape = row.parts, row.columns
    results = fuse(
        lambda refs: _Parts(refs, grouped, how, config).made(),
        name="matmul_combine",
        team=team,
        mainloop=mainloop_of(
            tiles,
            Product(lhs=dtype, rhs=dtype, out=dtype, rhs_transposed=rhs_transposed, ragged=True),
        ),
        num_tiles=grouped.num_tiles,
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            table=row_tiles(sizes, rows, tiles.tile_m, grouped.most, of_groups=True),
            positions=table.of_table(positions, NONE),
            weights=table.of_table(weights.astype(jnp.float32), 0),
        ),
        outs=dict(
            product=jax.ShapeDtypeStruct((rows, *shape), dtype),
            inbox=jax.ShapeDtypeStruct((team.size, tokens, *shape), wire_dtype),
        ),
        semaphores=dict(finished=SemaphoreArray((ceil_div(width, tiles.tile_n),), local=True)),
        buffers=how,
        transfer_registers=config.registers,
        signals=True,
        interpret=interpret,
    )
    return added_up(results["inbox"].reshape(team.size, tokens, width), positions, dtype)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of the kernel.

    Attributes:
      refs: of the kernel.
      grouped: the product.
      how: sums are made.
      config: of the kernel.
    """

    refs: Refs
    grouped: GroupedRows
    how: Summing
    config: Config

    def made(self) -> Parts:
        """The grouped product's, in bands, stored in the parts of rows, and then summed."""
        grouped, refs = self.grouped, self.refs
        segments = Segments.of([grouped.k] * len(refs.lhs), self.config.tiles.tile_k)
        lhs = streams.along_k(refs.lhs, segments, grouped.lhs_window)
        rhs = streams.along_k(refs.rhs, segments, grouped.rhs_window)
        n_tiles = ceil_div(grouped.n, self.config.tiles.tile_n)
        order = BandsOrder(grouped.order(refs, n_tiles), self.config.band)
        return Parts(
            order=order,
            ahead=True,
            k_tiles=segments.total,
            lhs=lhs,
            rhs=rhs,
            sink=Sink(
                store=self._store,
                stored=self._tell,
                rows=lambda tile: (tile.facts[2], tile.facts[3]),
            ),
            transfer=Transfer(run=self._sum),
        )

    def _store(self, tile: Tile, piece: Ref, row: Int, column: Int) -> None:
        """A piece lies in one part of its rows, and is stored unless it is beyond the last one."""
        rows, columns = piece.shape
        first = tile.n * self.config.tiles.tile_n + column

        @pl.when(first < self.grouped.n)
        def _():
            part = schedule.div(first, self.how.row.columns)
            within = first - part * self.how.row.columns
            place = pl.ds(tile.facts[1] * ALIGNED + row, rows), part, pl.ds(within, columns)
            plgpu.copy_smem_to_gmem(piece, self.refs.product.at[place], commit_group=False)

    def _tell(self, tile: Tile) -> None:
        # Publishes a tile to the summing warpgroups of all blocks.
        self.refs.finished.at[tile.n].signal()

    def _wait_for(self, piece: Int) -> None:
        """Returns once a piece of all rows is in place."""
        columns, tile_n = self.how.piece.parts * self.how.row.columns, self.config.tiles.tile_n
        row_tiles = self.refs.table[self.grouped.most, 0]

        def wait(n: jax.Array, _: None) -> None:
            self.refs.finished.at[n].wait(row_tiles)

        first = schedule.div(piece * columns, tile_n)
        last = schedule.div((piece + 1) * columns - 1, tile_n)
        lax.fori_loop(first, last + 1, wait, None)

    def _sum(self) -> None:
        """Makes this block's sums; all of them are in place on return."""
        Sums.of(
            self.how,
            rows=self.refs.product,
            positions=self.refs.positions,
            weights=self.refs.weights,
            inbox=self.refs.inbox,
            scratch=vars(self.refs),
            ready=self._wait_for,
        ).run()
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
