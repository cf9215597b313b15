"""Epilogues with arrays, and of pairs of products that give one result.

An array of an epilogue has one number for each column of the result, `[n]`, or for each row,
`[m, 1]`, or is as large as the result, `[m, n]`. The first two are *vectors*: a tile needs a few
hundred of their numbers, which are loaded once a tile, in float32. The third is the *matrix*: a tile
needs as many of its numbers as it stores. Each piece is loaded, in the result's type, into the
buffer from which the same piece of the result is stored.

| object | in memory, padded to whole tiles | loaded |
|---|---|---|
| columns | `[1, n]`, float32 | by the loading warp, after the tile's last stage |
| rows | `[..., 1, m]`, float32 | likewise |
| elements | as the result, and of its type | by the storing warp, as buffers become free |

For a pair of products, `gate` and `up`, a tile has `tile_n / 2` columns of each, side by side: one
stage of the ring and one accumulator hold both (`pairs`), and the result has half as many columns.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from stretto.distributed.schedule import Int
from stretto.kernels.engine import scales
from stretto.kernels.engine.parts import Beside, BesideParts, Load, Ref, Tile
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape, piece_window
from stretto.kernels.problem import epilogues
from stretto.kernels.problem.epilogue import Form

type Kind = Literal["columns", "rows", "elements"]


def of(form: Form | None, arrays: Sequence[Any]) -> Beside | None:
    """The description of an epilogue's arrays; None for a function of the total alone.

    `arrays` are `[1, n]`, `[m, 1]` and `[m, n]`, or a tuple of one for each result.
    """
    if form is None or not (arrays or form.gated):
        return None
    return Beside(kinds=tuple(kind_of(x) for x in arrays), gated=form.gated)


def kind_of(array: Any) -> Kind:
    """The kind of an array: `[1, n]`, `[m, 1]` or `[m, n]`; or of each of a tuple."""
    rows, columns = (array[0] if isinstance(array, tuple) else array).shape
    if rows == 1:
        return "columns"
    return "rows" if columns == 1 else "elements"


def all_in_memory(
    arrays: Sequence[Any], outs: Sequence[jax.ShapeDtypeStruct], shape: TileShape, parts: int
) -> list[list[jax.Array]]:
    """Each array as the kernel loads it (`in_memory`), once for each result that has its own."""

    def each(array: Any) -> list[jax.Array]:
        kind = kind_of(array)
        if not isinstance(array, tuple):
            array = (array,) * (len(outs) if kind == "columns" else 1)
        pairs = zip(array, outs, strict=False)
        return [in_memory(x, kind, out, shape, parts) for x, out in pairs]

    return [each(array) for array in arrays]


def in_memory(
    array: jax.Array,
    kind: Kind,
    out: jax.ShapeDtypeStruct,
    shape: TileShape,
    parts: int,
) -> jax.Array:
    """An array `[1, n]`, `[m, 1]` or `[m, n]` of an epilogue as the kernel loads it.

    Args:
      array: floats or bools, which become 0 and 1.
      kind: along which dimensions of the result it varies.
      out: the kernel's result, `[..., rows, n]`, whose parts may have more rows than `array`'s, and
        more columns.
      shape: of the result's tiles.
      parts: the number of equal parts of the result's rows.
    """
    *leading, rows, columns = out.shape
    if kind == "columns":
        array = jnp.broadcast_to(array, (1, columns)) if array.shape[1] == 1 else array
        missing = -(-columns // shape.tile_n) * shape.tile_n - array.shape[1]
        return jnp.pad(array.astype(jnp.float32), ((0, 0), (0, missing)))
    whole = rows // parts if not leading else rows
    x = array.reshape(parts, -1, array.shape[1])
    wide = columns - x.shape[2] if kind == "elements" else 0
    x = jnp.pad(x, ((0, 0), (0, whole - x.shape[1]), (0, wide)))
    x = x.reshape(*leading, rows, -1)
    if kind == "elements":
        return x.astype(out.dtype)
    return scales.of_rows(x.astype(jnp.float32), -(-rows // shape.tile_m) * shape.tile_m)


def parts_of(
    function: epilogues.Function,
    beside: Beside,
    arrays: Sequence[Sequence[Ref]],
    segments: Segments,
    shape: TileShape,
    leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: (),
    row: Callable[[Tile], Int] = lambda tile: tile.m,
    forms: epilogues.Forms = epilogues.AS_WRITTEN,
) -> BesideParts:
    """The parts of an epilogue with arrays, for results side by side in `segments`.

    Args:
      function: of one product, or two, and the arrays.
      beside: the description of its arrays.
      arrays: refs of each array (`all_in_memory`).
      segments: columns of tiles of the results.
      shape: of the result's tiles.
      leading: the indices of a tile's matrix in a result of more than two dimensions.
      row: the row of tiles in that matrix.
      forms: of activations in `function` (`kernel_forms`).
    """

    def vector(kind: str, refs: Sequence[Ref]) -> Load:
        if kind == "rows":
            return scales.load_rows(lambda tile: refs[0].at[leading(tile)], shape, row)
        return scales.load_columns(refs, segments, shape, "row")

    def window(tile: Tile, first_row: Int, rows: int, column: Int, columns: int) -> Ref:
        (ref,) = matrices[0]
        piece = piece_window(shape, row(tile), tile.n, first_row, rows, column, columns)
        return ref.at[*leading(tile), *piece]

    pairs = list(zip(beside.kinds, arrays, strict=True))
    matrices = [refs for kind, refs in pairs if kind == "elements"]
    return BesideParts(
        function=epilogues.without_derivatives(function, forms),
        vectors=tuple(vector(kind, refs) for kind, refs in pairs if kind != "elements"),
        window=window if matrices else None,
    )
