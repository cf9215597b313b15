"""`out = reduce_scatter(lhs @ rhs)`, the scatter under the matmul; and `all_reduce` on top of it.

Each device makes the tiles of its peers' rows, and keeps these products at home. A spare warp of
every block fetches the peers' products for the own rows, straight from where the peers keep them, as
they come to be. The own rows come last, or each tile some time after the same tile for the peers
(`tiles.OwnersOrder`). Between its products the device adds, in float32, what was fetched
(`matmul.Addends`), and stores the sum: at home, or for an all-reduce on every device.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `partial[s]` | the storing warps | | | the product for the `s + 1`-th successor |
| `produced[s, tile]` | a storing warp of the device at `-(s + 1)` | pulling warps | 1 | its `partial[s]` holds the tile |
| `fetched[s]` | the pulling warps | | | the product of the device at `-(s + 1)` |
| `arrived[tile]` | the pulling warps | storing warps | peers | the tile is in all of `fetched` |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads `partial` any more |
| `finished` | owners' storing warps, per tile | block 0's pulling warp | peers x tiles | all of `out` is in place (all-reduce) |

Tiles for peers are made before they have come to the launch; pulling and storing warps meet them
(`handshake`) before they signal. A store is complete, not only read, before its signal. All devices
make tiles wave by wave in the same order, and what a tile waits for belongs to the same wave or an
earlier one. The blocks of a wave work side by side and only own tiles wait, so that the devices
never wait for each other in a circle.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, schedule
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import matmul, padding, tile_config, tiles
from stretto.kernels.engine.segments import Segments
from stretto.kernels.fused import unfused
from stretto.kernels.fused.add_config import PIECE_ROWS, AddConfig, default_tiles
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AddConfig):
    """How the fused kernel is cut up; by default all of the own tiles come last."""


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    return Config(tiles=default_tiles(problem))


def run(operands: tuple[Sequence[jax.Array], Sequence[jax.Array]], call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, scattered -> `[m / D, n]`, as the public operation.

    Where m is no multiple of D, the last devices' rows are of padding: `[ceil(m / D), n]`.
    """
    if call.config.apart:
        return unfused.matmul_reduce_scatter(operands, call)
    return sharded(operands, call)[0]


def sharded(
    operands: tuple[Sequence[jax.Array], Sequence[jax.Array]],
    call: Call,
    *,
    everywhere: bool = False,
) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]` as `[shards, m_shard, n]`: what this device holds of it.

    The rows are dealt out in equal shards, the last ones of padding where they do not divide.
    """
    lhs, rhs = operands
    team = Team.along(call.axes)
    m, n = lhs[0].shape[0], rhs[0].shape[0 if call.options.rhs_transposed else 1]
    m_shard = schedule.ceil_div(m, team.size)

    def shards(x):
        if missing := team.size * m_shard - m:
            x = jnp.pad(x, ((0, missing), (0, 0)))
        x = x.reshape(team.size, m_shard, x.shape[1])
        return padding.pad(x, padding.ROWS, padding.COLUMNS)

    out = launch(
        [shards(x) for x in lhs],
        [padding.pad(x, padding.COLUMNS, padding.COLUMNS) for x in rhs],
        team,
        out_dtype=call.options.out_dtype,
        config=call.config,
        rhs_transposed=call.options.rhs_transposed,
        everywhere=everywhere,
        interpret=call.interpret,
    )
    return out[:, :m_shard, :n]


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=tile_config.obstacle,
    default=default_config,
    candidates=Config.candidates,
)


def launch(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    team: Team,
    *,
    out_dtype: jnp.dtype,
    config: AddConfig,
    rhs_transposed: bool = False,
    everywhere: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Runs the kernel on pairs of lhs `[size, m_shard, k_i]` and rhs `[k_i, n]`, or `[n, k_i]`.

    All must be padded (`padding`). The pairs' products are added up. Returns `[1, m_shard, n]`, or
    with `everywhere` (all-reduce) `[size, m_shard, n]`.
    """
    m_shard, n = lhs[0].shape[1], rhs[0].shape[0 if rhs_transposed else 1]
    parts = Segments.of([x.shape[2] for x in lhs], config.tiles.tile_k)
    shard = tiles.ShardOrder(m_shard, n, config.tiles)
    num_blocks = kernel.num_blocks_for(team.size * shard.tiles_per_shard)
    order = tiles.OwnersOrder(shard, team.size, num_blocks, lag=config.own_lag)
    peers = team.size - 1
    slots = (peers, shard.m_tiles * config.tiles.tile_m, shard.n_tiles * config.tiles.tile_n)
    piece = (PIECE_ROWS, tile_config.SWIZZLE_BYTES // out_dtype.itemsize)

    def body(*refs, pulled, pulled_bar, handshake, **rest):
        names = ("produced", "arrived", "released", "finished")
        sems = {name: rest.pop(name, None) for name in names}
        # Named once: the copy engine gets a descriptor for each naming of a peer.
        operands, (out, partial, fetched) = refs[:-3], refs[-3:]
        peers_outs = [
            copies.remote(out, team, team.neighbour(i)) for i in team.peer_offsets if everywhere
        ]
        refs = _Refs(
            lhs=operands[: len(lhs)],
            rhs=operands[len(lhs) :],
            outs=[out, *peers_outs],
            partial=partial,
            fetched=fetched,
            **sems,
        )

        def communicate():
            handshake.begin()
            _pull(team, order, refs, num_blocks, pulled, pulled_bar)
            for offset in team.peer_offsets:
                refs.released.signal(peer_id=team.neighbour(offset))

            @pl.when(kernel.block_id() == 0)
            def _():
                refs.released.wait(num_blocks * peers)
                if everywhere:
                    refs.finished.wait(peers * shard.tiles_per_shard)
                handshake.part()

        hooks = matmul.Hooks(
            locate=order.locate,
            load_lhs=functools.partial(_load_lhs, team, config.tiles, parts, refs),
            load_rhs=functools.partial(_load_rhs, config.tiles, parts, rhs_transposed, refs),
            store=functools.partial(_store, team, order, refs),
            before_stores=handshake.meet,
            stored=functools.partial(_tell, team, order, refs),
            rhs_transposed=rhs_transposed,
            addends=_addends(order, refs, peers),
            communicate=communicate,
        )
        matmul.run(
            hooks,
            config.tiles,
            num_tiles=order.num_tiles,
            k=parts.total * config.tiles.tile_k,
            num_blocks=num_blocks,
            **rest,
        )

    arrays = dict(
        produced=SemaphoreArray((peers, shard.tiles_per_shard)),
        arrived=SemaphoreArray((shard.tiles_per_shard,), local=True),
        released=SemaphoreArray(),
    )
    if everywhere:
        arrays["finished"] = SemaphoreArray()
    (out,) = kernel.launch(
        body,
        *lhs,
        *rhs,
        name="matmul_all_reduce" if everywhere else "matmul_reduce_scatter",
        team=team,
        out_type=[jax.ShapeDtypeStruct((team.size if everywhere else 1, m_shard, n), out_dtype)],
        symmetric=[jax.ShapeDtypeStruct(slots, out_dtype)] * 2,
        num_blocks=num_blocks,
        num_threads=tile_config.NUM_WARPGROUPS,
        semaphore_arrays=arrays,
        scratch=dict(
            pulled=plgpu.SMEM((config.pull_slots, *piece), out_dtype),
            pulled_bar=plgpu.Barrier(num_barriers=config.pull_slots),
            **tile_config.scratch(
                config.tiles, lhs[0].dtype, out_dtype, rhs_transposed=rhs_transposed
            ),
            **tile_config.addend_scratch(config.tiles),
        ),
        warps_that_meet=2,  # `released` and `finished` close.
        invariant=everywhere,
        interpret=interpret,
    )
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refs:
    """What the device functions share; `outs` are the own result and, of an all-reduce, the peers'.

    `finished` is None unless the result goes everywhere.
    """

    lhs: Sequence[Any]
    rhs: Sequence[Any]
    outs: list[Any]
    partial: Any
    fetched: Any
    produced: Any
    arrived: Any
    released: Any
    finished: Any


def _pull(team, order, refs, num_blocks, buffers, barriers):
    """The pulling warp: fetches whole tiles, one after another, in the order peers make them in.

    All devices go through the tiles in one order, but for the turns within a wave
    (`tiles.OwnersOrder`), so the peers' tiles for this device come in the order of its own list. A
    tile is in place before the next one is waited for: a device that made the next one only after
    it had got this one would never make it.
    """
    config, (_, piece_rows, piece_columns) = order.shard.config, buffers.shape
    across, down = config.tile_n // piece_columns, config.tile_m // piece_rows
    block = kernel.block_id()

    def source(step):
        return copies.remote(refs.partial, team, team.neighbour(-step - 1)).at[step]

    sources = [source(step) for step in range(team.size - 1)]

    def fetch_tile(i, _):
        step, m, n = order.locate_for_peers(block + i * num_blocks)
        tile = order.shard.index(m, n)
        refs.produced.at[step, tile].wait()

        def place(piece):
            row = schedule.div(piece, across)
            column = piece - row * across
            return copies.Place(
                step,
                m * config.tile_m + row * piece_rows,
                n * config.tile_n + column * piece_columns,
            )

        copies.Pull(
            pieces=across * down,
            place=place,
            sources=sources,
            destination=lambda step: refs.fetched.at[step],
            buffers=buffers,
            barriers=barriers,
        ).run()
        refs.arrived.at[tile].signal()

    tiles_of_peers = (team.size - 1) * order.shard.tiles_per_shard
    lax.fori_loop(0, schedule.share(tiles_of_peers, block, num_blocks), fetch_tile, None)


def _load_lhs(team, config, parts, refs, tile, k_index, slot, barrier):
    step, m, _ = tile
    owner = schedule.shard_of_step(team.device_id(), step + 1, team.size)  # Last, one's own.

    def load(index, k):
        window = config.lhs_tile(m, k)
        plgpu.copy_gmem_to_smem(refs.lhs[index].at[owner, *window], slot, barrier)

    parts.visit(k_index, load)


def _load_rhs(config, parts, transposed, refs, tile, k_index, slot, barrier):
    _, _, n = tile

    def load(index, k):
        window = config.rhs_tile(k, n, transposed)
        plgpu.copy_gmem_to_smem(refs.rhs[index].at[window], slot, barrier)

    parts.visit(k_index, load)


def _addends(order, refs, peers):
    """What is added to the products of the own rows: the peers' products for them."""

    def wait(tile):
        _, m, n = tile
        refs.arrived.at[order.shard.index(m, n)].wait(peers)

    def window(tile, number, *where):
        return _window(order, refs.fetched, number, tile, *where)

    return matmul.Addends(
        most=peers,
        count=lambda tile: schedule.where(tile[0] == peers, peers, 0),
        wait=wait,
        window=window,
    )


def _store(team, order, refs, tile, part, row, column):
    """Stores a part of a tile: for its owner to fetch, or, peers' parts added, as the result."""
    step, peers = tile[0], team.size - 1
    where = row, part.shape[0], column, part.shape[1]

    @pl.when(step < peers)
    def _():
        window = _window(order, refs.partial, step, tile, *where)
        plgpu.copy_smem_to_gmem(part, window, commit_group=False)

    @pl.when(step == peers)
    def _():
        index = 0 if refs.finished is None else team.device_id()
        for out in refs.outs:
            window = _window(order, out, index, tile, *where)
            plgpu.copy_smem_to_gmem(part, window, commit_group=False)


def _window(order, ref, index, tile, row, rows, column, columns):
    """A part of a tile in `ref[index]`."""
    _, m, n = tile
    config = order.shard.config
    first_row, first_column = m * config.tile_m + row, n * config.tile_n + column
    return ref.at[index, pl.ds(first_row, rows), pl.ds(first_column, columns)]


def _tell(team, order, refs, tile):
    """Tells of a tile that is in place: its owner, or every peer of a finished one."""
    step, m, n = tile
    for offset in team.peer_offsets:

        @pl.when(step == offset - 1)
        def _(offset=offset):
            sem = refs.produced.at[offset - 1, order.shard.index(m, n)]
            sem.signal(peer_id=team.neighbour(offset))

    if refs.finished is not None:

        @pl.when(step == team.size - 1)
        def _():
            for offset in team.peer_offsets:
                refs.finished.signal(peer_id=team.neighbour(offset))
