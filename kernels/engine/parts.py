"""The parts of a fused matmul: a kernel defines them, and a main loop uses them.

| part | defines |
|---|---|
| `Order` | the order of tiles, and their number |
| `Stream` | where the tiles of an operand are loaded from, and what they wait for (`Arrival`) |
| `Fold` | how the products along the contraction become the total of a tile |
| `Scales` | the factors of the products, for operands in 8 bits |
| `Epilogue` | the function that is applied to the total before it is stored |
| `BesideParts` | the same with arrays, or of two products |
| `Sink` | where the result of a tile is stored, and which signal follows |
| `Transfer` | the data that a spare warp, or warpgroup, of every block moves during the products |

`fuse` combines them with a main loop (`mainloop.Mainloop`), which is built for a `Product`: the
facts that are needed before the kernel's memory, and with it the parts, exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from stretto.distributed.schedule import Int
from stretto.kernels.engine.remainder import Part
from stretto.kernels.problem import epilogues
from stretto.kernels.problem.scales import Granularity

type Ref = Any  # Views of memory and barriers in a Pallas kernel have no public type.


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
      step: the shard, peer or group that it belongs to, in the order of work.
      m, n: row and column of tiles within that.
      facts: what the order has read from memory about the tile, for the other parts.
      part: what the block makes of it, where tiles are shared (`remainder`); None for all of it.
    """

    step: Int
    m: Int
    n: Int
    facts: tuple[Int, ...] = ()
    part: Part | None = None


class Order(Protocol):
    """The order of tiles: cluster `c` of `C` computes those at `c`, `c + C`, ..."""

    def count(self) -> Int:
        """The number of tiles, perhaps read from memory; called once, first in the kernel."""
        ...

    def locate(self, index: Int, /) -> Tile:
        """The tile at `index`; called by every role, for each of its tiles."""
        ...


class Load(Protocol):
    """Called in the loading warp: starts one bulk copy into a stage of shared memory."""

    def __call__(self, tile: Tile, k: Int, stage: Ref, barrier: Ref, /) -> None:
        """Copies tile `k` along the contraction to `stage` (`stages.fill`).

        It arrives at `barrier` once.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """What the tiles of an operand wait for before they are loaded.

    Attributes:
      columns: of the contraction between one wait and the next; a multiple of `tile_k`.
      wait: called in the polling warp, ahead of the loads, with (tile, index of the wait along the
        contraction); returns once the operand may be loaded up to the next wait.
    """

    columns: int
    wait: Callable[[Tile, Int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """An operand, tile by tile."""

    load: Load
    arrival: Arrival | None = None


class Fold:
    """How products along the contraction become a total; a main loop lists the kinds it has."""


@dataclasses.dataclass(frozen=True)
class Sum(Fold):
    """The products alone are added up in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addends(Fold):
    """The products are added up in float32, and with them matrices of the result's type.

    Attributes:
      most: the most matrices that are added to a tile.
      count: tile -> the number of matrices that are added to it.
      wait: called with (tile) in the warp that loads them; returns once they may be read.
      window: (tile, index of the addend, first row, rows, first column, columns), within the tile
        -> the view of global memory that holds this piece of the addend.
      last: the same without the index for the last of `most`, where that lies apart, as the result
        does: it ends where the result ends, and not with a tile.
    """

    most: int
    count: Callable[[Tile], Int]
    wait: Callable[[Tile], None]
    window: Callable[[Tile, Int, Int, int, Int, int], Ref]
    last: Callable[[Tile, Int, int, Int, int], Ref] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """What products are multiplied by before they are added to anything else.

    Both are loaded into shared memory: for granularity "row" once for each tile, at `k` 0; for
    "block" and "mx" with each tile along the contraction.

    Attributes:
      lhs: the scales of the tile's rows, float32 `[tile_m]`.
      rhs: of "row" those of its columns, float32 `[tile_n]`; of "block" that of all its columns,
        `SCALE_COPIES` times over.

    Of "mx" both are float8_e8m0fnu, `[rows / 128, 1, 32, 16]`, and loaded by `stages.fill`.
    """

    lhs: Load
    rhs: Load


SCALE_COPIES = 4
"""Of one scale in float32: the 16 bytes that the copy engine takes at least."""


class Epilogue(Protocol):
    """Called in the warps that hold a total."""

    def __call__(self, piece: jax.Array, tile: Tile, row: Int, column: Int, /) -> jax.Array:
        """What is stored in place of the float32 `piece` at (`row`, `column`) of the tile."""
        ...


def elementwise(
    fun: epilogues.Function | None, forms: epilogues.Forms = epilogues.AS_WRITTEN
) -> Epilogue | None:
    """The epilogue of an elementwise function, which does not depend on the elements' places.

    Its activations are in `forms` (`kernel_forms`).
    """
    if fun is None:
        return None
    plain = epilogues.without_derivatives(fun, forms)
    return lambda piece, tile, row, column: plain(piece)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """What an epilogue takes beside the total, as far as it is known before there is any memory.

    Attributes:
      kinds: how each of its arrays lies along the result: "columns", "rows" or "elements", of which
        there is one at most.
      gated: a tile holds two products, and the epilogue makes one result of them.
    """

    kinds: tuple[str, ...] = ()
    gated: bool = False

    @property
    def vectors(self) -> tuple[str, ...]:
        """The kinds of the arrays that are loaded once a tile."""
        return tuple(kind for kind in self.kinds if kind != "elements")

    @property
    def has_matrix(self) -> bool:
        """Whether one of the arrays is as large as the result."""
        return "elements" in self.kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideParts:
    """An epilogue that takes more than the total (`beside`).

    Attributes:
      function: float32 pieces of one product, or of two, and of the arrays -> what is stored.
      vectors: load float32 `[tile_m]` of "rows" and `[tile_n]` of "columns", at `k` 0.
      window: (tile, first row, rows, first column, columns), within the tile -> the view of global
        memory that holds this piece of the matrix.
    """

    function: Callable[..., jax.Array]
    vectors: tuple[Load, ...] = ()
    window: Callable[[Tile, Int, int, Int, int], Ref] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sink:
    """Where results go.

    Attributes:
      store: called in the storing warp with (tile, piece of the result in shared memory, its first
        row and column within the tile); starts the copies to where it goes, in no group of copies.
      stored: called in the storing warp with (tile) once all its stores are complete, for the
        signal that must follow; of a tile that several blocks make (`TileShape.blocks`), in each
        of them once its own part is stored.
      before: called in the storing warp with (tile) before its first store, which it may hold up.
      rows: tile -> (first row, row after the last one) of those that are stored; for a `Product`
        that is ragged. Pieces that reach beyond are stored in part.
    """

    store: Callable[[Tile, Ref, Int, Int], None]
    stored: Callable[[Tile], None] | None = None
    before: Callable[[Tile], None] | None = None
    rows: Callable[[Tile], tuple[Int, Int]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """The data that one warp of every block moves, in a kernel of several devices.

    One that calculates is run by a warpgroup (`fuse`).

    Attributes:
      run: called once peers' memory may be read; returns when this block has read all it needs.
      finish: called in block 0, once no peer reads this device's memory any more and no block
        waits for operands; waits for all other events that must precede the end of the kernel.
    """

    run: Callable[[], None]
    finish: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A kernel, as the sum of its parts.

    Attributes:
      k_tiles: the length of the contraction, in tiles: a number, or a function of the tile, called
        by every role, which may read it from memory; it may be zero for a tile.
      ahead: `order.locate` is called a tile ahead, also once beyond the last one: for an order that
        reads memory, which takes as long as a step of the contraction.
      own_tiles: (cluster) -> how many tiles are its own, where `order` gives clusters other numbers
        of them than equal ones; its `i`-th one is then at `cluster + i * C` all the same.
    """

    order: Order
    k_tiles: int | Callable[[Tile], Int]
    lhs: Stream
    rhs: Stream
    sink: Sink
    fold: Fold = Sum()
    scales: Scales | None = None
    epilogue: Epilogue | None = None
    beside: BesideParts | None = None
    transfer: Transfer | None = None
    ahead: bool = False
    own_tiles: Callable[[Int], Int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """The product that a main loop is built for, as known before the kernel has any memory.

    Attributes:
      lhs, rhs, out: types of the operands and of the result.
      lhs_transposed: tiles of lhs are stored as `[tile_k, tile_m]`.
      rhs_transposed: tiles of rhs are stored as `[tile_n, tile_k]`.
      ragged: the sink stores some tiles in part (`Sink.rows`).
      lhs_edges, rhs_edges, out_edges: the matrix is not made of whole 8 x 64 tiles
        (`padding.is_whole`); a ragged product's result must be.
      fold: the kind of `Parts.fold`.
      scales: the granularity of `Parts.scales`; None without them.
      beside: what `Parts.beside` takes, in place of an `epilogue`; None without it.
    """

    lhs: jax.typing.DTypeLike
    rhs: jax.typing.DTypeLike
    out: jax.typing.DTypeLike
    lhs_transposed: bool = False
    rhs_transposed: bool = False
    ragged: bool = False
    lhs_edges: bool = False
    rhs_edges: bool = False
    out_edges: bool = False
    fold: type[Fold] = Sum
    scales: Granularity | None = None
    beside: Beside | None = None
