"""All-gather matmuls, whichever way lhs is gathered under them: what all ways have in common.

A way of gathering is four things (`Gather`): an order of the tiles, the stream of lhs with what it
waits for, the plan of what is fetched, and the place of a tile in the result.

| way | for |
|---|---|
| `gathering_by_shards` | rows, in shards that fill tiles: shard after shard |
| `gathering_rows_first` | rows, in shards smaller than a tile: all of them first, as one matrix |
| `gathering_by_columns` | columns, the contraction |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.schedule import Int
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import beside, padding, pairs, sinks, streams
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import (
    BesideParts,
    Load,
    Parts,
    Product,
    Ref,
    Scales,
    Stream,
    Tile,
    Transfer,
    elementwise,
)
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.engine.transfers import Buffers, Fetch, pull
from stretto.kernels.operation import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """A way of gathering lhs.

    Attributes:
      order: of the tiles of the result.
      k_tiles: length of the contraction, in tiles.
      lhs: the kernel's refs -> the stream of lhs, own and gathered (`gathered`), which waits for
        `received`.
      rhs_window: (shape of tiles, tile along the contraction, column of tiles) -> the window of
        rhs.
      fetch: what is fetched from peers; the key of a place is its index in `received`.
      leading: tile -> the indices of its matrix in the result.
      received: shape of the semaphores that count pieces.
      out_rows: shape of the result, but for its columns.
      gathered: shape of what is gathered, `[..., columns of lhs]`.
      shards: equal parts that the rows of the result consist of.
      complete: (what was gathered, lhs) -> all shards in their order, the device's own among them.
      scales: how lhs's are gathered, of operands in 8 bits.
    """

    order: ShardOrder
    k_tiles: int
    lhs: Callable[[Refs], Stream]
    rhs_window: Callable[[TileShape, Int, Int], tuple]
    fetch: Fetch
    leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: ()
    received: tuple[int, ...]
    out_rows: tuple[int, ...]
    gathered: tuple[int, ...]
    shards: int
    complete: Callable[[jax.Array, jax.Array], jax.Array]
    scales: GatheredScales | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredScales:
    """The scales of lhs, which are gathered as its rows are, and ahead of them.

    Attributes:
      load: the kernel's refs -> what loads those of a tile's rows, own (`lhs_scales`) and gathered
        (`gathered_scales`).
      fetch: what is fetched from peers; the key of a place is its index in `received`.
      shape: of what is gathered.
    """

    load: Callable[[Refs], Load]
    fetch: Fetch
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where the shards of the peers are kept, in an array of several.

    Attributes:
      team: the devices.
      by_shard: in the order of the shards, with room for the device's own; if False, in the order
        of the steps, without its own.
    """

    team: Team
    by_shard: bool

    @property
    def count(self) -> int:
        """Number of shards in the buffer."""
        return self.team.size - (not self.by_shard)

    def index(self, step: Int) -> Int:
        """The index of the shard of `step`, which belongs to the device `step` places further."""
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return shard if self.by_shard else step - 1


def launch(
    gather: Gather,
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    arrays: Sequence[Any],
    team: Team,
    call: Call,
    *,
    wanted: Sequence[int],
    name: str,
    scaling: Scaling | None = None,
) -> list[jax.Array]:
    """Runs the kernel on lhs, this device's shard, and each of rhs, all of them padded.

    `arrays` are the epilogue's. With `scaling`, that of the same operands, `gather.scales` says how
    lhs's are gathered, and there are no arrays.

    Returns the results `[*gather.out_rows, n_i]`, and after them the gathered lhs, if requested.
    The results have the `wanted` columns, or a few more.
    """
    shape, options = gather.order.shape, call.options
    out_dtype, rhs_transposed = options.out_dtype, options.rhs_transposed
    taken = beside.of(options.epilogue, arrays)
    widths = results_widths(rhs, options)
    of_result = result_tile(shape, options)
    columns = Segments.of(widths, of_result.tile_n)
    outs = [
        jax.ShapeDtypeStruct(
            (*gather.out_rows, padding.made_columns(n, width, out_dtype, shape)), out_dtype
        )
        for n, width in zip(wanted, widths, strict=True)
    ]
    product = Product(
        lhs=lhs.dtype,
        rhs=rhs[0].dtype,
        out=out_dtype,
        rhs_transposed=rhs_transposed,
        scales=None if scaling is None else scaling.granularity,
        beside=taken,
        **padding.edges(shape, lhs=lhs, rhs=[_matrix(x, rhs_transposed) for x in rhs], out=outs),
    )
    pieces = [Buffers(call.config.pull_slots, *gather.fetch.piece, lhs.dtype)]
    scale_outs = {}
    if gather.scales is not None:
        piece = gather.scales.fetch.piece
        pieces.append(Buffers(call.config.pull_slots, *piece, jnp.float32, name="pulled_scales"))
        scale_outs = dict(gathered_scales=jax.ShapeDtypeStruct(gather.scales.shape, jnp.float32))

    def fetch(refs: Refs) -> None:
        def fetch_all(of: Fetch, source: Ref, gathered: Ref, buffers: Ref, barriers: Ref) -> None:
            pull(
                of,
                source,
                gathered,
                # Publishes a piece to the polling warps of all blocks.
                arrived=lambda place: refs.received.at[place.key].signal(),
                buffers=buffers,
                barriers=barriers,
                num_blocks=refs.num_blocks,
            )

        if gather.scales is not None:
            fetch_all(
                gather.scales.fetch,
                refs.lhs_scales,
                refs.gathered_scales,
                refs.pulled_scales,
                refs.pulled_scales_full,
            )
        fetch_all(gather.fetch, refs.lhs, refs.gathered, refs.pulled, refs.pulled_full)

    def scales_of(refs: Refs) -> Scales | None:
        if scaling is None or gather.scales is None:
            return None
        return scaling.parts(gather.scales.load(refs), refs.rhs_scales, columns, shape)

    def rhs_stream(refs: Refs) -> Stream:
        if taken is not None and taken.gated:
            window = functools.partial(gather.rhs_window, pairs.halved(shape))
            return pairs.pair_along_n(refs.rhs, shape, rhs_transposed, window)
        return streams.along_n(refs.rhs, columns, functools.partial(gather.rhs_window, shape))

    def besides(refs: Refs) -> BesideParts | None:
        if taken is None:
            return None
        function = options.epilogue.function
        return beside.parts_of(function, taken, refs.beside, columns, of_result, gather.leading)

    def parts(refs: Refs) -> Parts:
        function = options.epilogue.function if options.epilogue and taken is None else None
        return Parts(
            order=gather.order,
            k_tiles=gather.k_tiles,
            lhs=gather.lhs(refs),
            rhs=rhs_stream(refs),
            sink=sinks.along_n(refs.outs, columns, of_result, gather.leading),
            epilogue=elementwise(function),
            beside=besides(refs),
            scales=scales_of(refs),
            transfer=Transfer(run=lambda: fetch(refs)),
        )

    results = fuse(
        parts,
        name=name,
        team=team,
        mainloop=mainloop_of(shape, product),
        num_tiles=gather.order.num_tiles,
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            beside=beside.all_in_memory(arrays, outs, of_result, gather.shards),
            **({} if scaling is None else scaling.operands()),
        ),
        outs=dict(
            outs=outs,
            gathered=jax.ShapeDtypeStruct(gather.gathered, lhs.dtype),
            **scale_outs,
        ),
        semaphores=dict(received=SemaphoreArray(gather.received, local=True)),
        buffers=pieces,
        waits=True,
        interpret=call.interpret,
    )
    if not options.return_gathered:
        return results["outs"]
    return [*results["outs"], gather.complete(results["gathered"], lhs)]


def kept_columns(lhs: jax.Array, by_shard: bool) -> int:
    """Columns that peers' shards like lhs are kept in: aligned, but where they are returned."""
    return lhs.shape[1] if by_shard else padding.in_lines(lhs.shape[1], lhs.dtype)


def is_used_often(rows: int, rhs_transposed: bool) -> bool:
    """Whether rhs is copied to aligned rows for a result of so many rows (`padding.REUSE`)."""
    return rows >= padding.REUSE["lhs" if rhs_transposed else "rhs"]


def _matrix(rhs: jax.Array, transposed: bool) -> jax.ShapeDtypeStruct:
    """A matrix of rhs as a tile is copied out of it, without the dimension of the devices."""
    return jax.ShapeDtypeStruct((rhs.shape[0 if transposed else -2], rhs.shape[-1]), rhs.dtype)


def widths_of(rhs: Sequence[jax.Array], rhs_transposed: bool) -> list[int]:
    """The columns of each of rhs, `[..., k, n_i]` or `[n_i, ..., k]`."""
    return [x.shape[0 if rhs_transposed else -1] for x in rhs]


def results_widths(rhs: Sequence[jax.Array], options: Any) -> list[int]:
    """The columns of each result: with a gated epilogue there is one, of a pair in rhs."""
    form = options.epilogue
    widths = widths_of(rhs, options.rhs_transposed)
    return widths[:1] if form is not None and form.gated else widths


def result_tile(shape: Any, options: Any) -> Any:
    """The tile of the result that a tile of products becomes."""
    form = options.epilogue
    return pairs.halved(shape) if form is not None and form.gated else shape


def tiled_columns(rhs: Sequence[jax.Array], options: Any, shape: Any) -> int:
    """The columns of all tiles of products, as `ShardOrder` counts them."""
    results = Segments.of(results_widths(rhs, options), result_tile(shape, options).tile_n)
    return results.total * shape.tile_n
