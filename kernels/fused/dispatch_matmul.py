"""The dispatch of tokens to their experts, overlapped with the grouped matmul of their rows: `rows @ rhs`.

One spare warp of every block pulls token rows, directly from `x` on the other devices, into the rows of
its own device's experts, in the order in which the tiles use them. A tile starts when its rows have
arrived. A row is fetched once for each choice of its token. `dispatch` fetches it once, and so sends
less, but here the transfer overlaps the products, and the first tile waits for its own rows only.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | the pulling warps | | | tokens, expert by expert |
| `pulled_full[slot]` | the copy engine | the pulling warp | 1 | a piece of a row is in shared memory |
| `received[b]` | each pulling warp, per piece | the polling warps, for tiles of these rows | pieces of `tile_m` rows | rows `b tile_m` to `(b + 1) tile_m - 1` are in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's `x` any more |

Peers' tokens are ready after the pulling warp's handshake. A tile may extend past the rows of its
group: into rows of other groups, for which it also waits, and past the last row, where the first token of
the device is used instead.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives.token_tables import everyones, of_device
from stretto.kernels.engine import padding, stages
from stretto.kernels.engine.architectures import TileConfig, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.parts import Arrival, Parts, Product, Ref, Stream, Tile, Transfer
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.engine.transfers import Buffers
from stretto.kernels.fused.activated import Activated
from stretto.kernels.fused.group_tables import ALIGNED, row_tiles
from stretto.kernels.fused.grouped_matmul import GroupedRows
from stretto.kernels.fused.obstacles import check_pull_slots
from stretto.kernels.problem.problem import Problem

PIECE_BYTES = 4096
MAX_COLUMNS = 256  # of the copy engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the kernel.

    Attributes:
      tiles: of the matmul.
      pull_slots: pieces of rows on their way at once, per block.
    """

    tiles: TileConfig = tile_config.LARGE
    pull_slots: int = 4

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        del problem
        self.tiles.check()
        check_pull_slots(self.pull_slots)
        needed = self.tiles.smem_bytes(2) + self.pull_slots * PIECE_BYTES
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {SMEM_BYTES}; take fewer stages or slots."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """The configurations that the tuner tries, likely ones first."""
        del problem
        for tiles in (tile_config.LARGE, tile_config.WIDE_RESULT):
            yield Config(tiles=tiles)


class Rows(NamedTuple):
    """A row of `x` as `[parts, columns]`; a piece has `piece` parts of it."""

    parts: int
    columns: int
    piece: int

    @classmethod
    def of(cls, width: int, tile_k: int) -> Rows:
        """A row of `width` elements, a multiple of `tile_k`, in parts that are, too."""
        columns = max(c for c in range(tile_k, MAX_COLUMNS + 1, tile_k) if width % c == 0)
        parts = width // columns
        most = PIECE_BYTES // (2 * columns)
        return cls(parts, columns, max(p for p in range(1, most + 1) if parts % p == 0))

    @property
    def pieces(self) -> int:
        """The pieces of a row."""
        return self.parts // self.piece


def obstacle(x: jax.Array, rhs: jax.Array, rows: int, tiles: TileConfig) -> str | None:
    """Why the kernel does not support such operands of a grouped matmul; None if it does."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {x.dtype}."
    if x.shape[1] % tiles.tile_k or x.shape[1] < 2 * tiles.tile_k:
        return f"rows of d={x.shape[1]} are no multiple of {tiles.tile_k}, or just one."
    if rows % ALIGNED or rows < 2 * ALIGNED or 0 in (*x.shape, *rhs.shape):
        return f"room for {rows} rows is no multiple of {ALIGNED}, or there is nothing to do."
    return None


def dispatch_matmul(
    x: jax.Array,
    sources: jax.Array,
    sizes: jax.Array,
    rhs: jax.Array | Activated,
    team: Team,
    *,
    config: Config,
    rhs_transposed: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """`[tokens, d]` and `[e, d, n]` (transposed `[e, n, d]`) -> rows `[r, d]`, product `[r, n]`.

    Args:
      x: the device's own tokens.
      sources: int32 `[r]`, the origin of each row: `token * D + device`, with the device as an
        offset on the ring; 0 for rows of no expert.
      sizes: int32 `[e]`, rows of each expert.
      rhs: a matrix for each expert; or with an activation, of the configuration's tiles, which is
        made of the product then.
      team: the devices.
      config: of the kernel.
      rhs_transposed: whether rhs is `[e, n, d]`.
      interpret: as of `fuse`.

    Rows of no expert have undefined values, and are zero in the product, or undefined in what the
    activation makes of it.
    """
    tiles, (tokens, width), rows = config.tiles, x.shape, len(sources)
    row = Rows.of(width, tiles.tile_k)
    activated = isinstance(rhs, Activated)
    if isinstance(rhs, Activated):
        n, grouped, product = rhs.width, rhs.rows(rows), rhs.product(x.dtype, x.dtype)
        operands, make = rhs.operands(), rhs.parts
    else:
        n = rhs.shape[1 if rhs_transposed else 2]
        rhs = padding.pad_to_tiles(rhs, padding.COLUMNS)
        grouped = GroupedRows.of(rows, rhs, tiles, rhs_transposed)
        product = Product(
            lhs=x.dtype, rhs=rhs.dtype, out=x.dtype, rhs_transposed=rhs_transposed, ragged=True
        )
        operands = dict(rhs=rhs)
        make = lambda refs, grouped, lhs: grouped.parts(refs, lhs)  # noqa: E731
    used = jnp.minimum(jnp.sum(sizes), rows)
    pulled = jnp.minimum(rows, ceil_div_of(used, tiles.tile_m) * tiles.tile_m + tiles.tile_m)

    def parts(refs: Refs) -> Parts:
        pull = _Pull(refs, team, row, tiles.tile_m)
        transfer = Transfer(run=pull.run)
        return dataclasses.replace(make(refs, grouped, pull.stream(tiles)), transfer=transfer)

    found = fuse(
        parts,
        name="dispatch_matmul",
        team=team,
        mainloop=mainloop_of(tiles, product),
        num_tiles=grouped.num_tiles,
        operands=dict(
            x=x.reshape(tokens, row.parts, row.columns),
            **operands,
            table=row_tiles(sizes, rows, tiles.tile_m, grouped.most, of_groups=activated),
            sources=sources,
            pulled_rows=pulled.astype(jnp.int32)[None],
        ),
        outs=dict(
            out=jax.ShapeDtypeStruct((rows, grouped.n), x.dtype),
            rows=jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype),
        ),
        semaphores=dict(received=SemaphoreArray((ceil_div(rows, tiles.tile_m) + 1,), local=True)),
        buffers=Buffers(config.pull_slots, row.piece, row.columns, x.dtype),
        waits=True,
        interpret=interpret,
    )
    return found["rows"].reshape(rows, width), found["out"][:, :n]


def ceil_div_of(x: jax.Array, by: int) -> jax.Array:
    """`x / by`, rounded up."""
    return (x + (by - 1)) // by


@dataclasses.dataclass(frozen=True)
class _Pull:
    """Pulls rows, piece by piece, in their order; the blocks take pieces in turn.

    Attributes:
      refs: of the kernel.
      team: the devices.
      row: the division of a row into pieces.
      tile_m: rows that `received` counts together.
    """

    refs: Refs
    team: Team
    row: Rows
    tile_m: int

    def stream(self, tiles: TileConfig) -> Stream:
        """The rows of a tile, which waits for those of the one or two blocks that it lies in."""
        per_part = self.row.columns // tiles.tile_k

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            part = schedule.div(k, per_part)
            column = (k - part * per_part) * tiles.tile_k
            first = tile.facts[1] * ALIGNED
            window = pl.ds(first, tiles.tile_m), part, pl.ds(column, tiles.tile_k)
            stages.fill(self.refs.rows.at[window], stage, barrier)

        def wait(tile: Tile, gate: Int) -> None:
            del gate
            first = tile.facts[1] * ALIGNED
            block = schedule.div(first, self.tile_m)
            self._wait_for(block)
            pl.when(first > block * self.tile_m)(lambda: self._wait_for(block + 1))

        return Stream(
            load=load, arrival=Arrival(columns=self.row.parts * self.row.columns, wait=wait)
        )

    def _wait_for(self, block: Int) -> None:
        """Returns once all pieces of rows that are pulled into a block of rows are in place."""
        rows = jnp.clip(self.refs.pulled_rows[0] - block * self.tile_m, 0, self.tile_m)
        self.refs.received.at[block].wait(rows * self.row.pieces)

    def run(self) -> None:
        """Pulls this block's share; all of it is in place, and counted, on return."""
        refs, slots = self.refs, self.refs.pulled.shape[0]
        block = kernel.block_id()
        own = schedule.share(refs.pulled_rows[0] * self.row.pieces, block, refs.num_blocks)
        tokens = everyones(refs.x, self.team)

        def place(i: Int) -> tuple[Int, Any]:
            piece = block + i * refs.num_blocks
            row = schedule.div(piece, self.row.pieces)
            first = (piece - row * self.row.pieces) * self.row.piece
            return row, pl.ds(first, self.row.piece)

        def fetch(i: Int) -> None:
            row, window = place(i)
            source = refs.sources[row]
            token = schedule.div(source, self.team.size)
            slot = schedule.rem(i, slots)
            of_device(
                tokens,
                source - token * self.team.size,
                lambda ref: plgpu.copy_gmem_to_smem(
                    ref.at[token, window], refs.pulled.at[slot], refs.pulled_full.at[slot]
                ),
            )

        def keep(i: Int) -> None:
            row, window = place(i)
            slot = schedule.rem(i, slots)
            plgpu.barrier_wait(refs.pulled_full.at[slot])
            plgpu.copy_smem_to_gmem(refs.pulled.at[slot], refs.rows.at[row, window])

        def tell(i: Int) -> None:
            # Publishes a piece to the polling warps of all blocks.
            refs.received.at[schedule.div(place(i)[0], self.tile_m)].signal()

        def step(i: jax.Array, _: None) -> None:
            keep(i)

            # At most the newest store is unfinished: the one before has left its slot.
            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=False)
                tell(i - 1)
                pl.when(i - 1 + slots < own)(lambda: fetch(i - 1 + slots))

        for slot in range(slots):
            pl.when(slot < own)(lambda slot=slot: fetch(jnp.int32(slot)))
        lax.fori_loop(0, own, step, None)

        @pl.when(own > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            tell(own - 1)
