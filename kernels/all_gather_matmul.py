"""`out = epilogue(all_gather(lhs) @ rhs)`, for one rhs or several, the gather under the matmul.

Each device multiplies its own shard of lhs first, then those of its successors on the ring. One
spare warp of every block fetches the peers' shards meanwhile, straight from the peers' operands,
into a local buffer, in the order in which the matmul will want them; the matmul waits for a chunk
of columns at a time. Pulling leaves the data semaphores local: the only word between devices is,
at the end, that a peer's operand is no longer needed.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered.shard(i + 1)` | the pulling warps | | | shard of the `i + 1`-th successor |
| `received[i, c]` | each pulling warp, per piece | the looking-out warps, step `i + 1` | pieces in chunk `c` | columns `c` of that shard are in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's lhs any more |

Peers' operands are ready when a kernel starts, by XLA's barrier before every collective kernel.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, schedule
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels import costs, matmul, tile_config, tiles
from stretto.kernels.dispatch import Problem, Verdict
from stretto.kernels.epilogues import without_derivatives
from stretto.kernels.reference import Epilogue
from stretto.kernels.segments import Segments
from stretto.kernels.tile_config import TileConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the fused kernel is cut up.

    Attributes:
      tiles: of the matmul.
      pull_rows, pull_columns: a piece that the pulling warp fetches at once, in elements.
      pull_slots: pieces on their way at once, per block.
      chunk_columns: columns of a shard that the matmul waits for at once.
    """

    tiles: TileConfig = TileConfig()  # noqa: RUF009 - frozen
    pull_rows: int = 16
    pull_columns: int = 256
    pull_slots: int = 2
    chunk_columns: int = 1024

    def check(self, itemsize: int) -> None:
        """Raises ValueError unless the kernel can be built so, for operands of `itemsize` bytes."""
        self.tiles.check()
        if self.pull_rows > 256 or self.pull_columns > 256:
            raise ValueError(
                f"a piece of {self.pull_rows} x {self.pull_columns} is too large: the copy engine"
                " takes at most 256 elements a side."
            )
        if self.chunk_columns % self.pull_columns or self.chunk_columns % self.tiles.tile_k:
            raise ValueError(
                f"chunk_columns={self.chunk_columns} must be a multiple of"
                f" pull_columns={self.pull_columns} and of tile_k={self.tiles.tile_k}."
            )
        needed = self.smem_bytes(itemsize)
        if needed > tile_config.SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {tile_config.SMEM_BYTES}; take fewer stages or smaller pieces."
            )

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, in bytes."""
        pieces = self.pull_slots * self.pull_rows * self.pull_columns * itemsize
        return self.tiles.smem_bytes(itemsize) + pieces

    @staticmethod
    def candidates() -> Iterator[Config]:
        """What the tuner tries."""
        for tile_n, stages, buffers in ((128, 5, 2), (256, 3, 4)):
            tile = TileConfig(tile_n=tile_n, num_stages=stages, store_buffers=buffers)
            for chunk_columns in (1024, 2048, 4096):
                yield Config(tiles=tile, chunk_columns=chunk_columns)


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
    return Config(chunk_columns=gate * max(1, schedule.ceil_div(problem.k, 4 * gate)))


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
    num_blocks = kernel.num_multiprocessors()
    plan = _plan(config, m_shard, k)
    columns = [x.shape[0 if rhs_transposed else 1] for x in rhs]
    parts = Segments(tuple(schedule.ceil_div(n, config.tiles.tile_n) for n in columns))
    order = tiles.ShardOrder(m_shard, parts.total * config.tiles.tile_n, config.tiles)

    def body(lhs_ref, *refs, received, released, pulled, arrived, **own):
        sems = dict(received=received, released=released)
        gathered = _Gathered(refs[-1], team, return_gathered)
        refs = _Refs(lhs_ref, refs[: len(rhs)], refs[len(rhs) : -1], gathered, **sems)
        hooks = matmul.Hooks(
            locate=order.locate,
            load_lhs=functools.partial(_load_lhs, config.tiles, refs),
            load_rhs=functools.partial(_load_rhs, config.tiles, parts, rhs_transposed, refs),
            store=functools.partial(_store, team, config.tiles, parts, refs),
            rhs_transposed=rhs_transposed,
            epilogue=None if epilogue is None else without_derivatives(epilogue),
            gate=matmul.Gate(
                columns=plan.chunk_columns, wait=functools.partial(_wait_for_chunk, plan, refs)
            ),
            communicate=lambda: _pull(team, plan, refs, num_blocks, pulled, arrived),
        )
        matmul.run(
            hooks,
            config.tiles,
            num_tiles=team.size * order.tiles_per_shard,
            k=k,
            num_blocks=num_blocks,
            **own,
        )

    peers = team.size - 1
    *outs, gathered = kernel.launch(
        body,
        lhs,
        *rhs,
        name="all_gather_matmul",
        team=team,
        out_type=[
            *(jax.ShapeDtypeStruct((team.size, m_shard, n), out_dtype) for n in columns),
            jax.ShapeDtypeStruct((team.size if return_gathered else peers, m_shard, k), lhs.dtype),
        ],
        num_blocks=num_blocks,
        num_threads=tile_config.NUM_WARPGROUPS,
        semaphore_arrays=dict(
            received=SemaphoreArray((peers, plan.chunks), local=True), released=SemaphoreArray()
        ),
        scratch=dict(
            pulled=plgpu.SMEM((config.pull_slots, config.pull_rows, plan.piece_columns), lhs.dtype),
            arrived=plgpu.Barrier(num_barriers=config.pull_slots),
            **tile_config.scratch(
                config.tiles, lhs.dtype, out_dtype, rhs_transposed=rhs_transposed
            ),
            **tile_config.gate_scratch(),
        ),
        closing_barrier=False,  # `released` does it, long before the matmul is over.
        interpret=interpret,
    )
    if return_gathered:  # The own rows were multiplied from where they are.
        outs.append(lax.dynamic_update_index_in_dim(gathered, lhs, team.device_id(), 0))
    return outs


def _plan(config: Config, m_shard: int, k: int) -> schedule.PullPlan:
    """How the peers' shards are fetched."""
    # A piece as wide as lhs would not be cut off at the last row (`copies.Pull`).
    pull_columns = config.pull_columns // (2 if config.pull_columns == k else 1)
    return schedule.PullPlan(
        rows=m_shard,
        columns=k,
        piece_rows=config.pull_rows,
        piece_columns=pull_columns,
        chunk_columns=config.chunk_columns,
    )


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """Where the peers' rows go: in the order of the steps or, as a result, of the shards."""

    ref: Any
    team: Team
    by_shard: bool

    def shard(self, step: schedule.Int) -> Any:
        """The rows that are multiplied at `step`, which is not 0."""
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return self.ref.at[shard if self.by_shard else step - 1]


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What the device functions share."""

    lhs: Any
    rhs: Sequence[Any]
    outs: Sequence[Any]
    gathered: _Gathered
    received: Any
    released: Any


def _pull(team, plan, refs, num_blocks, buffers, barriers):
    """The pulling warp: fetches the peers' rows in the order in which the matmul wants them."""
    block, peers = kernel.block_id(), team.size - 1

    def place(i):
        source, piece = plan.piece_of(block + i * num_blocks)
        row, column, chunk = plan.locate(piece)
        return copies.Place(source, row, column, chunk)

    copies.Pull(
        pieces=schedule.share(peers * plan.pieces, block, num_blocks),
        place=place,
        sources=[copies.remote(refs.lhs, team, team.neighbour(i)) for i in team.peer_offsets],
        destination=lambda source: refs.gathered.shard(source + 1),
        arrived=lambda place: refs.received.at[place.source, place.key].signal(),
        buffers=buffers,
        barriers=barriers,
    ).run()
    for offset in team.peer_offsets:
        refs.released.signal(peer_id=team.neighbour(offset))

    @pl.when(block == 0)
    def _():
        refs.released.wait(num_blocks * peers)


def _wait_for_chunk(plan, refs, tile, chunk):
    step, _, _ = tile

    @pl.when(step > 0)
    def _():
        refs.received.at[step - 1, chunk].wait(plan.pieces_in_chunk(chunk))


def _load_lhs(config, refs, tile, k_index, slot, barrier):
    step, m, _ = tile
    window = config.lhs_tile(m, k_index)

    @pl.when(step == 0)
    def _():
        plgpu.copy_gmem_to_smem(refs.lhs.at[window], slot, barrier)

    @pl.when(step > 0)
    def _():
        plgpu.copy_gmem_to_smem(refs.gathered.shard(step).at[window], slot, barrier)


def _load_rhs(config, parts, transposed, refs, tile, k_index, slot, barrier):
    _, _, n = tile

    def load(index, n):
        window = config.rhs_tile(k_index, n, transposed)
        plgpu.copy_gmem_to_smem(refs.rhs[index].at[window], slot, barrier)

    parts.visit(n, load)


def _store(team, config, parts, refs, tile, part, row, column):
    step, m, n = tile
    rows, columns = part.shape
    shard = schedule.shard_of_step(team.device_id(), step, team.size)
    row_slice = pl.ds(m * config.tile_m + row, rows)

    def store(index, n):
        window = refs.outs[index].at[shard, row_slice, pl.ds(n * config.tile_n + column, columns)]
        plgpu.copy_smem_to_gmem(part, window, commit_group=False)

    parts.visit(n, store)
