"""`out = reduce_scatter(lhs @ rhs)`, the scatter under the matmul; and `all_reduce` on top of it.

Each device multiplies the rows that its peers own before its own (`tiles.ScatterOrder`). A tile of somebody else's
rows is stored straight into a slot of its owner's memory, over NVLink, by the same bulk copy that
would store it at home. When the owner comes to the tile itself, it adds what the peers have sent to
its own product in float32 and stores the sum: at home, or for an all-reduce on every device.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `partial[s]` | device `owner - 1 - s` | | | its product for the owner's rows |
| `received[tile, w]` | warpgroup `w` of each peer, once | the owner's warpgroup `w` | peers | its rows of the tile are in all slots |
| `finished` | the owner's warpgroups, once a tile | block 0 of every peer | see `launch` | all of `out` is in place (all-reduce) |

A store is complete, not only read, before its signal: it is waited for while the next tile is
multiplied. Every signal is waited for, so nobody ends while a peer still writes to it.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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
from stretto.kernels.dispatch import Problem
from stretto.kernels.tile_config import MULTIPLYING_WARPGROUPS, TileConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the fused kernel is cut up.

    Attributes:
      tiles: of the matmul.
      rounds: at most how often a device turns to its own rows (`tiles.ScatterOrder`).
    """

    tiles: TileConfig = TileConfig(num_stages=3, store_buffers=4)  # noqa: RUF009 - frozen
    rounds: int = 4

    def check(self, itemsize: int) -> None:
        """Raises ValueError unless the kernel can be built so, for operands of `itemsize` bytes."""
        self.tiles.check()
        needed = self.tiles.smem_bytes(itemsize)
        if needed > tile_config.SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {tile_config.SMEM_BYTES}; take fewer stages."
            )

    @staticmethod
    def candidates() -> Iterator[Config]:
        """What the tuner tries."""
        for tile_n, stages, buffers in ((128, 5, 2), (256, 3, 4)):
            for rounds in (1, 4):
                tile = TileConfig(tile_n=tile_n, num_stages=stages, store_buffers=buffers)
                yield Config(tiles=tile, rounds=rounds)


def unsupported(problem: Problem, config: Config | None) -> str | None:
    """Why the kernel cannot serve `problem`, or None if it can; ValueError for a bad `config`."""
    obstacle = tile_config.unsupported(problem)
    if obstacle is None and config is not None:
        config.check(2)
    return obstacle


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    del problem
    return Config()


def estimate(problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA), from sizes and rates alone."""
    return costs.matmul_reduce_scatter(problem)


def launch(
    lhs: jax.Array,
    rhs: jax.Array,
    team: Team,
    *,
    out_dtype: jnp.dtype,
    config: Config,
    everywhere: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Runs the kernel on lhs `[size, m_shard, k_shard]` and rhs `[k_shard, n]`, padded (`padding`).

    Returns `[1, m_shard, n]`, or with `everywhere` (all-reduce) `[size, m_shard, n]`.
    """
    m_shard, n = lhs.shape[1], rhs.shape[1]
    order = tiles.ScatterOrder(m_shard, n, config.tiles, team.size, config.rounds)
    num_blocks = kernel.num_multiprocessors()
    peers = team.size - 1
    slots = (peers, order.m_tiles * config.tiles.tile_m, order.n_tiles * config.tiles.tile_n)

    def body(lhs_ref, rhs_ref, out_ref, partial_ref, *, received, fetched, finished=None, **own):
        refs = _Refs(lhs_ref, rhs_ref, out_ref, partial_ref, received, fetched, finished)

        def communicate():
            @pl.when(kernel.block_id(config.tiles.cluster_size) == 0)
            def _():
                finished.wait(peers * order.tiles_per_shard * MULTIPLYING_WARPGROUPS)

        hooks = matmul.Hooks(
            locate=matmul.locate_in(order),
            load_lhs=lambda *args: _load_lhs(team, config.tiles, refs, *args),
            load_rhs=lambda *args: _load_rhs(config.tiles, refs, *args),
            finish=lambda *args: _finish(team, order, refs, *args),
            settle=lambda *args: _settle(team, order, refs, *args),
            communicate=communicate if everywhere else None,
        )
        matmul.run(
            hooks,
            config.tiles,
            num_groups=team.size * order.m_groups * order.n_tiles,
            k=rhs.shape[0],
            num_blocks=num_blocks,
            **own,
        )

    arrays = dict(received=SemaphoreArray((order.tiles_per_shard, MULTIPLYING_WARPGROUPS)))
    if everywhere:
        arrays["finished"] = SemaphoreArray()
    (out,) = kernel.launch(
        body,
        lhs,
        rhs,
        name="matmul_all_reduce" if everywhere else "matmul_reduce_scatter",
        team=team,
        out_type=[jax.ShapeDtypeStruct((team.size if everywhere else 1, m_shard, n), out_dtype)],
        symmetric=[jax.ShapeDtypeStruct(slots, out_dtype)],
        num_blocks=num_blocks,
        num_threads=tile_config.NUM_WARPGROUPS,
        cluster_size=config.tiles.cluster_size,
        semaphore_arrays=arrays,
        scratch=dict(
            fetched=plgpu.Barrier(num_barriers=MULTIPLYING_WARPGROUPS * config.tiles.store_buffers),
            **tile_config.scratch(config.tiles, lhs.dtype, out_dtype),
        ),
        closing_barrier=False,  # Every signal is waited for.
        invariant=everywhere,
        interpret=interpret,
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What the device functions share; `finished` is None unless the result goes everywhere."""

    lhs: Any
    rhs: Any
    out: Any
    partial: Any
    received: Any
    fetched: Any
    finished: Any


def _owner(team: Team, step: schedule.Int) -> jax.Array:
    """Whose rows are multiplied at `step`: the successors' in turn, one's own last."""
    return schedule.shard_of_step(team.device_id(), step + 1, team.size)


def _load_lhs(team, config, refs, tile, k_index, slot, barrier):
    step, m, _ = tile
    rows = pl.ds(m * config.tile_m, config.tile_m)
    columns = pl.ds(k_index * config.tile_k, config.tile_k)
    plgpu.copy_gmem_to_smem(refs.lhs.at[_owner(team, step), rows, columns], slot, barrier)


def _load_rhs(config, refs, tile, k_index, slot, barrier):
    _, _, n = tile
    rows = pl.ds(k_index * config.tile_k, config.tile_k)
    columns = pl.ds(n * config.tile_n, config.tile_n)
    tile_config.copy_rhs(refs.rhs.at[rows, columns], slot, barrier, config)


def _finish(team, order, refs, tile, product, buffers, part_row):
    """Stores a part of a tile: in a slot of its owner, or with the peers' parts added, as result."""
    step, m, n = tile
    first_row = m * order.config.tile_m + part_row
    first_column = n * order.config.tile_n

    def window(ref, index, row, rows, column, columns):
        return ref.at[index, pl.ds(first_row + row, rows), pl.ds(first_column + column, columns)]

    for offset in team.peer_offsets:

        @pl.when(step == offset - 1)
        def _(offset=offset):
            slots = copies.remote(refs.partial, team, team.neighbour(offset))
            matmul.store(product, buffers, lambda *where: [window(slots, offset - 1, *where)])

    peers = team.size - 1

    @pl.when(step == peers)
    def _():
        warpgroup = lax.axis_index(kernel.THREAD_AXIS)
        refs.received.at[order.index(m, n), warpgroup].wait(peers)

        index = team.device_id() if refs.finished is not None else 0
        outs = [refs.out]
        if refs.finished is not None:
            outs += [copies.remote(refs.out, team, team.neighbour(i)) for i in team.peer_offsets]
        _add_and_store(
            product,
            buffers,
            [refs.fetched.at[warpgroup * buffers.shape[0] + i] for i in range(buffers.shape[0])],
            [lambda *where, slot=slot: window(refs.partial, slot, *where) for slot in range(peers)],
            lambda *where: [window(o, index, *where) for o in outs],
        )


def _add_and_store(product, buffers, fetched, partials, windows):
    """Adds the peers' parts to the own product, piece by piece, and stores the sum.

    The last buffer is for the stores, the others for the fetches (where there are others).
    """
    fetching = max(buffers.shape[0] - 1, 1)
    stored = buffers.shape[0] - 1
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The buffers have been read.
    for row, column, piece in matmul.pieces_of(product, buffers):
        where = row, piece.shape[0], column, piece.shape[1]
        for first in range(0, len(partials), fetching):
            batch = partials[first : first + fetching]
            for index, partial in enumerate(batch):
                if stored == 0:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.copy_gmem_to_smem(partial(*where), buffers.at[index], fetched[index])
            for index in range(len(batch)):
                plgpu.barrier_wait(fetched[index])
                piece += buffers.at[index][...].astype(jnp.float32)
            plgpu.commit_smem()  # All threads have read before the buffers are filled again.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        matmul.store_piece(piece, buffers.at[stored], windows, row, column)


def _settle(team, order, refs, tile, warpgroup):
    """Tells of a tile that is in place: its owner, or every peer of a finished one."""
    step, m, n = tile
    for offset in team.peer_offsets:

        @pl.when(step == offset - 1)
        def _(offset=offset):
            refs.received.at[order.index(m, n), warpgroup].signal(peer_id=team.neighbour(offset))

    if refs.finished is not None:

        @pl.when(step == team.size - 1)
        def _():
            for offset in team.peer_offsets:
                refs.finished.signal(peer_id=team.neighbour(offset))
