"""The activation of experts in the grouped matmul of their rows: `activation(rows @ w_in + b_in)`.

Only the activation is stored, `[rows, f]`, and not the product, which gated is twice as wide. And
only rows of experts are: the other half of the room or more costs nothing, while an activation by
XLA reads and writes all of it. The epilogue and its barriers are those of `engine/hopper/applying`:

| array | in memory | loaded |
|---|---|---|
| a matrix `[e, d, f]`, gated two, or one `[e, d, 2 f]` | as given | half a stage each (`engine/pairs`) |
| a bias `[e, f]`, gated two, or one `[e, 2 f]` | float32 `[e + 1, f]`, padded to tiles | as a vector, at the tile's expert |
| of operands in 8 bits, matrices `[e, f, d]` likewise | as given | half a stage each |
| their scales `[e, f, 1]` | float32 `[e + 1, 1, f]`, padded to tiles | after a tile's last stage, those of gate and of up |

The last row of a bias is that of rows of no expert, which share tiles with others. Operands in 8 bits
have scales of rows and columns, and the activation is stored in 16: in 8 bits it would need the scale
of its row, which several tiles have parts of.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, ceil_div
from stretto.kernels.engine import padding, pairs, streams
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import (
    Beside,
    BesideParts,
    Load,
    Parts,
    Product,
    Ref,
    Scales,
    Stream,
    Tile,
    elementwise,
)
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.fused.grouped_matmul import GroupedRows
from stretto.kernels.fused.scaled_groups import scaling_of_groups
from stretto.kernels.problem import epilogues


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Activated:
    """A grouped product with an activation.

    Attributes:
      function: of the float32 product, or of gate and up; elementwise.
      gated: which of the two.
      sides: matrices `[e, d, f]`, padded; gated one or two (`w_in` of `mixture_of_experts`). In 8
        bits they are transposed, `[e, f, d]`.
      biases: `[e, f]` of each product; or none.
      width: f.
      tiles: of the matmul.
      scaling: of operands in 8 bits.
    """

    function: Callable[..., jax.Array]
    gated: bool
    sides: tuple[jax.Array, ...]
    biases: tuple[jax.Array, ...]
    width: int
    tiles: TileConfig
    scaling: Scaling | None = None

    @classmethod
    def of(
        cls,
        sides: Sequence[jax.Array],
        biases: Sequence[jax.Array] | None,
        function: Callable[..., jax.Array],
        *,
        gated: bool,
        tiles: TileConfig,
    ) -> Activated:
        """Of the operands of a layer, which must serve (`obstacle`)."""
        halved = gated and len(sides) == 1
        biases = tuple(biases or ())
        if halved:
            biases = tuple(half for x in biases for half in jnp.split(x, 2, axis=1))
        return cls(
            function=function,
            gated=gated,
            sides=tuple(padding.pad_to_tiles(x, padding.COLUMNS) for x in sides),
            biases=biases,
            width=sides[0].shape[2] // (2 if halved else 1),
            tiles=tiles,
        )

    @classmethod
    def of_8_bits(
        cls,
        lhs: jax.Array,
        lhs_scale: jax.Array,
        sides: Sequence[jax.Array],
        scales: Sequence[jax.Array],
        sizes: jax.Array,
        function: Callable[..., jax.Array],
        *,
        gated: bool,
        tiles: TileConfig,
    ) -> Activated:
        """Of rows `[m, d]` and transposed matrices `[e, f, d]` with scales of rows and columns."""
        padded = tuple(padding.pad_to_tiles(x, padding.COLUMNS) for x in sides)
        rows = padding.pad_to_tiles(lhs, padding.ROWS)
        halved = gated and len(sides) == 1
        return cls(
            function=function,
            gated=gated,
            sides=padded,
            biases=(),
            width=sides[0].shape[1] // (2 if halved else 1),
            tiles=tiles,
            scaling=scaling_of_groups("row", rows, padded, sizes, lhs_scale, scales, tiles),
        )

    @property
    def result_tile(self) -> TileConfig:
        """The tile of the result that a tile of products becomes."""
        return pairs.halved(self.tiles) if self.gated else self.tiles

    def rows(self, m: int) -> GroupedRows:
        """The product of `m` rows, in tiles of the result."""
        transposed = self.scaling is not None
        groups, k = self.sides[0].shape[0], self.sides[0].shape[2 if transposed else 1]
        most = ceil_div(m, self.tiles.tile_m) + groups + 1
        columns = padding.padded(self.width, padding.COLUMNS)
        return GroupedRows(most, k, columns, groups, self.result_tile, rhs_transposed=transposed)

    def product(self, dtype: jax.typing.DTypeLike, out: jax.typing.DTypeLike) -> Product:
        """Of rows of a type, for a result of type `out`."""
        return Product(
            lhs=dtype,
            rhs=self.sides[0].dtype,
            out=out,
            rhs_transposed=self.scaling is not None,
            ragged=True,
            scales=None if self.scaling is None else self.scaling.granularity,
            beside=self.beside,
        )

    @property
    def beside(self) -> Beside | None:
        """What the function takes beside one product."""
        if not self.gated and not self.biases:
            return None
        return Beside(kinds=("columns",) * len(self.biases), gated=self.gated)

    def operands(self) -> dict[str, Any]:
        """Of the kernel, by the names that `parts` reads."""
        tile_n = self.result_tile.tile_n
        missing = ceil_div(self.width, tile_n) * tile_n - self.width
        biases = [jnp.pad(bias.astype(jnp.float32), ((0, 1), (0, missing))) for bias in self.biases]
        scales = {} if self.scaling is None else self.scaling.operands()
        return dict(rhs=list(self.sides), biases=biases, **scales)

    def parts(self, refs: Refs, grouped: GroupedRows, lhs: Stream) -> Parts:
        """The kernel, whose rows are `lhs` and whose product is `rows`."""
        made = dataclasses.replace(
            grouped.parts(refs, lhs),
            rhs=self._rhs(refs, grouped),
            scales=self._scales(refs, grouped),
        )
        if self.beside is None:
            return dataclasses.replace(made, epilogue=elementwise(self.function))
        vectors = tuple(self._bias(ref) for ref in refs.biases)
        function = epilogues.without_derivatives(self._of_sums)
        return dataclasses.replace(made, beside=BesideParts(function=function, vectors=vectors))

    def _of_sums(self, *xs: jax.Array) -> jax.Array:
        """The function of products and biases."""
        products, biases = xs[: 1 + self.gated], xs[1 + self.gated :]
        if biases:
            products = [x + bias for x, bias in zip(products, biases, strict=True)]
        return self.function(*products)

    def _rhs(self, refs: Refs, grouped: GroupedRows) -> Stream:
        if not self.gated:
            return streams.of(refs.rhs[0], grouped.rhs_window)

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            transposed = grouped.rhs_transposed
            group, *window = grouped.rhs_window(tile, k)
            along_k, columns = window[::-1] if transposed else window
            windows = [
                ref.at[group, *((own, along_k) if transposed else (along_k, own))]
                for ref, own in zip(self._of_pair(refs.rhs), self._halves(columns), strict=True)
            ]
            pairs.fill(windows, self.tiles, stage, barrier, transposed)

        return Stream(load=load)

    def _of_pair(self, refs: Sequence[Ref]) -> tuple[Ref, Ref]:
        """Those of gate and up, which may lie in one."""
        return refs[0], refs[-1]

    def _halves(self, columns: pl.Slice) -> tuple[pl.Slice, pl.Slice]:
        """Columns of the result, as those of gate and of up."""
        if len(self.sides) > 1:
            return columns, columns
        return columns, pl.ds(columns.start + self.width, columns.size)

    def _scales(self, refs: Refs, grouped: GroupedRows) -> Scales | None:
        if self.scaling is None:
            return None
        if not self.gated:
            return grouped.scales(refs, self.scaling)
        tile_n = self.result_tile.tile_n

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            halves = self._halves(pl.ds(tile.n * tile_n, tile_n))
            for index, ref in enumerate(self._of_pair(refs.rhs_scales)):
                window = ref.at[tile.facts[0], k, halves[index]]
                half = stage.at[pl.ds(index * tile_n, tile_n)]
                plgpu.copy_gmem_to_smem(window, half, barrier)

        return Scales(lhs=grouped.scales_of_rows(refs), rhs=load)

    def _bias(self, ref: Ref) -> Load:
        tile_n = self.result_tile.tile_n

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            del k
            window = tile.facts[0], pl.ds(tile.n * tile_n, tile_n)
            plgpu.copy_gmem_to_smem(ref.at[window], stage, barrier)

        return load
