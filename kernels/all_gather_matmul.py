"""`out = epilogue(all_gather(lhs) @ rhs)`, for one rhs or several, the gather under the matmul.

Each device multiplies its own shard of lhs first, then those of its successors on the ring. One
spare warp of every block fetches the peers' shards meanwhile, straight from the peers' operands,
into a local buffer, in the order in which the matmul will want them; the matmul waits for a chunk
of columns at a time. Pulling leaves the data semaphores local: the only word between devices is,
at the end, that a peer's operand is no longer needed. With `Config.whole` all rows are gathered first
and multiplied as one matrix (`gathering`); `received` then has no first index.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered`, shard `i` | the pulling warps | | | shard of the `i + 1`-th successor |
| `received[i, c]` | each pulling warp, per piece | the looking-out warps, step `i + 1` | pieces in chunk `c` | columns `c` of that shard are in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's lhs any more |

Peers' operands are ready once the pulling warp has met them (`handshake`).
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, schedule
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels import costs, gathering, matmul, tile_config
from stretto.kernels.dispatch import Problem, Verdict
from stretto.kernels.epilogues import without_derivatives
from stretto.kernels.pull_config import PullConfig
from stretto.kernels.reference import Epilogue
from stretto.kernels.segments import Segments
from stretto.kernels.tile_config import TileConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PullConfig):
    """How the fused kernel is cut up.

    Attributes:
      chunk_columns: columns of a shard that the matmul waits for at once.
      whole: gather all rows into one matrix and multiply that, for shards smaller than a tile;
        otherwise shard after shard, under which the gather hides (`gathering`).
      apart: gather with a kernel that only gathers, and multiply by XLA's matmul (`apart`); all
        else is then of no account.
    """

    chunk_columns: int = 1024
    whole: bool = False
    apart: bool = False

    def check(self, itemsize: int) -> None:
        """Raises ValueError unless the kernel can be built so, for operands of `itemsize` bytes."""
        super().check(itemsize)
        if self.chunk_columns % self.pull_columns or self.chunk_columns % self.tiles.tile_k:
            raise ValueError(
                f"chunk_columns={self.chunk_columns} must be a multiple of"
                f" pull_columns={self.pull_columns} and of tile_k={self.tiles.tile_k}."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, for one problem or for all."""
        if problem is None or _is_small(problem):
            yield Config(apart=True)
            for tile in (tile_config.NARROW, tile_config.NARROWEST):
                yield Config(tiles=tile, chunk_columns=2048, whole=True)
        if problem is None or not _is_small(problem):
            for tile in (tile_config.NARROW, tile_config.LARGE):
                for chunk_columns in (1024, 2048, 4096):
                    yield Config(tiles=tile, chunk_columns=chunk_columns)


def _is_small(problem: Problem) -> bool:
    """Whether a shard does not fill a tile."""
    return schedule.ceil_div(problem.m, problem.devices) < TileConfig.tile_m


def unsupported(problem: Problem, config: Config | None) -> str | None:
    """Why the kernel cannot serve `problem`, or None if it can; ValueError for a bad `config`."""
    obstacle = tile_config.unsupported(problem)
    if obstacle is None and config is not None:
        config.check(2)
    return obstacle


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has.

    Few gates cost least: about four a tile were best at k from 8192 to 16384 on 4 H100s.
    """
    gate = Config.pull_columns
    chunk_columns = gate * max(1, schedule.ceil_div(problem.k, 4 * gate))
    if not _is_small(problem):
        return Config(chunk_columns=chunk_columns)
    # The narrowest tiles of which every multiprocessor has one at most.
    rows = schedule.ceil_div(problem.m, TileConfig.tile_m)
    columns = schedule.ceil_div(problem.n, problem.devices)
    fits = rows * schedule.ceil_div(columns, tile_config.NARROWEST.tile_n) <= costs.BLOCKS
    tiles = tile_config.NARROWEST if fits else tile_config.NARROW
    return Config(tiles=tiles, chunk_columns=chunk_columns, whole=True)


def estimate(problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA), from sizes and rates alone."""
    return costs.all_gather_matmul(problem)


def judge(problem: Problem) -> Verdict:
    """Which implementation should be faster, by `estimate`."""
    return costs.judge(estimate(problem))


def launch(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    team: Team,
    *,
    epilogue: Epilogue | None,
    out_dtype: jnp.dtype,
    config: Config,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    interpret: Any = None,
) -> list[jax.Array]:
    """Runs the kernel on lhs `[m_shard, k]` and each of rhs, `[k, n_i]` or `[n_i, k]` transposed.

    All must be padded (`padding`). Returns the products `[size, m_shard, n_i]`, and after them, if
    asked for, the gathered lhs `[size, m_shard, k]`.
    """
    m_shard, k = lhs.shape
    parts = Segments.of([x.shape[0 if rhs_transposed else 1] for x in rhs], config.tiles.tile_n)
    layout = gathering.layout(
        team,
        m_shard,
        k,
        parts.total * config.tiles.tile_n,
        config.tiles,
        (config.pull_rows, config.piece_columns(k, k), config.chunk_columns),
        whole=config.whole,
        by_shard=return_gathered,
    )
    results = launch_with(
        layout,
        lhs,
        rhs,
        parts,
        name="all_gather_matmul",
        pull_slots=config.pull_slots,
        epilogue=epilogue,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        interpret=interpret,
    )
    return [x.reshape(team.size, m_shard, -1) for x in results]


def launch_with(
    layout: gathering.Layout,
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    parts: Segments,
    *,
    name: str,
    pull_slots: int,
    epilogue: Epilogue | None,
    out_dtype: jnp.dtype,
    rhs_transposed: bool,
    return_gathered: bool,
    interpret: Any,
) -> list[jax.Array]:
    """Runs the kernel as `layout` gathers lhs; `parts` are the tiles along the columns of rhs.

    Returns the products and the gathered lhs, if asked for, in shapes of `layout.rows_shape`.
    """
    config, plan, team = layout.config, layout.plan, layout.team
    num_blocks = kernel.num_blocks_for(layout.num_tiles)

    def body(lhs_ref, *refs, received, released, pulled, arrived, handshake, **own):
        sems = dict(received=received, released=released)
        refs = _Refs(lhs_ref, refs[: len(rhs)], refs[len(rhs) : -1], refs[-1], **sems)
        hooks = matmul.Hooks(
            locate=layout.order.locate,
            load_lhs=functools.partial(layout.load, refs.lhs, refs.gathered),
            load_rhs=functools.partial(_load_rhs, layout, parts, rhs_transposed, refs),
            store=functools.partial(_store, layout, parts, refs),
            rhs_transposed=rhs_transposed,
            epilogue=None if epilogue is None else without_derivatives(epilogue),
            gate=matmul.Gate(
                columns=layout.gate_columns,
                wait=functools.partial(layout.wait, refs.received),
                # Or what the peers' start takes would count against the limit of these waits.
                before=handshake.meet,
            ),
            communicate=lambda: _pull(layout, refs, num_blocks, pulled, arrived, handshake),
        )
        matmul.run(
            hooks,
            config,
            num_tiles=layout.num_tiles,
            k=layout.contraction,
            num_blocks=num_blocks,
            **own,
        )

    rows, gathered_rows = layout.rows_shape(gathered=False), layout.rows_shape(gathered=True)
    columns = [x.shape[0 if rhs_transposed else 1] for x in rhs]
    *outs, gathered = kernel.launch(
        body,
        lhs,
        *rhs,
        name=name,
        team=team,
        out_type=[
            *(jax.ShapeDtypeStruct((*rows, n), out_dtype) for n in columns),
            jax.ShapeDtypeStruct((*gathered_rows, lhs.shape[1]), lhs.dtype),
        ],
        num_blocks=num_blocks,
        num_threads=tile_config.NUM_WARPGROUPS,
        semaphore_arrays=dict(
            received=SemaphoreArray(layout.semaphores, local=True), released=SemaphoreArray()
        ),
        scratch=dict(
            pulled=plgpu.SMEM((pull_slots, plan.piece_rows, plan.piece_columns), lhs.dtype),
            arrived=plgpu.Barrier(num_barriers=pull_slots),
            **tile_config.scratch(config, lhs.dtype, out_dtype, rhs_transposed=rhs_transposed),
            **tile_config.gate_scratch(),
        ),
        warps_that_meet=2,  # `released` closes, long before the matmul is over.
        interpret=interpret,
    )
    return [*outs, layout.with_own(gathered, lhs)] if return_gathered else outs


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What the device functions share."""

    lhs: Any
    rhs: Sequence[Any]
    outs: Sequence[Any]
    gathered: Any
    received: Any
    released: Any


def _pull(layout, refs, num_blocks, buffers, barriers, handshake):
    """The pulling warp: fetches pieces in the order in which the matmul wants them."""
    block, team = kernel.block_id(), layout.team
    handshake.begin()
    copies.Pull(
        pieces=schedule.share(layout.num_pieces, block, num_blocks),
        place=lambda i: layout.place(block + i * num_blocks),
        sources=layout.sources(refs.lhs),
        destination=lambda source: layout.destination(refs.gathered, source),
        arrived=lambda place: refs.received.at[place.key].signal(),
        buffers=buffers,
        barriers=barriers,
    ).run()
    for offset in team.peer_offsets:
        refs.released.signal(peer_id=team.neighbour(offset))

    @pl.when(block == 0)
    def _():
        refs.released.wait(num_blocks * (team.size - 1))
        handshake.part()


def _load_rhs(layout, parts, transposed, refs, tile, k_index, slot, barrier):
    _, _, n = tile

    def load(index, n):
        window = layout.config.rhs_tile(layout.rhs_k(k_index), n, transposed)
        plgpu.copy_gmem_to_smem(refs.rhs[index].at[window], slot, barrier)

    parts.visit(n, load)


def _store(layout, parts, refs, tile, part, row, column):
    _, m, n = tile
    rows, columns = part.shape
    config = layout.config

    def store(index, n):
        row_slice = pl.ds(m * config.tile_m + row, rows)
        column_slice = pl.ds(n * config.tile_n + column, columns)
        window = layout.out_window(refs.outs[index], tile, row_slice, column_slice)
        plgpu.copy_smem_to_gmem(part, window, commit_group=False)

    parts.visit(n, store)
