"""The kernel of the all-gather matmuls, made of a way in which lhs is gathered (`gather_ways`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import beside, padding, pairs, sinks, streams
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.parts import (
    BesideParts,
    Parts,
    Product,
    Ref,
    Scales,
    Stream,
    Transfer,
    elementwise,
)
from stretto.kernels.engine.remainder import sharing_of
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.engine.transfers import Buffers, Fetch, pull
from stretto.kernels.fused.gather_ways import Gather
from stretto.kernels.operation import Call
from stretto.kernels.problem import epilogues, kernel_forms


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """The parts of a kernel that gathers and multiplies.

    Attributes:
      gather: the way of gathering.
      options: of the call.
      taken: the epilogue, where it has arrays or takes two products.
      of_result: the tile of a result, of `columns` in all of them together.
      scaling: of operands in 8 bits.
    """

    gather: Gather
    options: Any
    taken: beside.Beside | None
    columns: Segments
    of_result: TileShape
    scaling: Scaling | None

    @property
    def shape(self) -> Any:
        """Of the tiles of products."""
        return self.gather.order.shape

    @property
    def forms(self) -> epilogues.Forms:
        """In which the epilogue has activations."""
        return kernel_forms.forms_for(self.options.out_dtype)

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        """Exponentials without a range reduction, where they are those of `forms` alone."""
        form = self.options.epilogue
        if form is None:
            return plgpu.CompilerParams()
        count = 1 + form.gated + len(self.taken.kinds if self.taken else ())
        dtypes = [jnp.float32] * count
        approximate = epilogues.is_approximate(form.function, dtypes, self.forms)
        return plgpu.CompilerParams(approx_math=approximate)

    def parts(self, refs: Refs) -> Parts:
        """What `fuse` makes a kernel of."""
        gather, form = self.gather, self.options.epilogue
        function = form.function if form and self.taken is None else None
        return Parts(
            order=gather.order,
            k_tiles=gather.k_tiles,
            lhs=gather.lhs(refs),
            rhs=self._rhs(refs),
            sink=sinks.along_n(refs.outs, self.columns, self.of_result, gather.leading, gather.row),
            epilogue=elementwise(function, self.forms),
            beside=self._beside(refs),
            scales=self._scales(refs),
            transfer=Transfer(run=lambda: self._fetch(refs), finish=refs.received.zero),
        )

    def _rhs(self, refs: Refs) -> Stream:
        window = self.gather.rhs_window
        if self.taken is not None and self.taken.gated:
            of_half = functools.partial(window, pairs.halved(self.shape))
            return pairs.pair_along_n(refs.rhs, self.shape, self.options.rhs_transposed, of_half)
        return streams.along_n(refs.rhs, self.columns, functools.partial(window, self.shape))

    def _beside(self, refs: Refs) -> BesideParts | None:
        if self.taken is None:
            return None
        return beside.parts_of(
            self.options.epilogue.function,
            self.taken,
            refs.beside,
            self.columns,
            self.of_result,
            self.gather.leading,
            self.gather.row,
            self.forms,
        )

    def _scales(self, refs: Refs) -> Scales | None:
        if self.scaling is None or self.gather.scales is None:
            return None
        load = self.gather.scales.load(refs)
        return self.scaling.parts(load, refs.rhs_scales, self.columns, self.shape)

    def _fetch(self, refs: Refs) -> None:
        """Pulls what is gathered, scales ahead of their rows."""

        def fetch(of: Fetch, source: Ref, gathered: Ref, buffers: Ref, barriers: Ref) -> None:
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

        scales = None if self.gather.scales is None else self.gather.scales.fetch
        if scales is not None:
            fetch(
                scales,
                refs.lhs_scales,
                refs.gathered_scales,
                refs.pulled_scales,
                refs.pulled_scales_full,
            )
        fetch(self.gather.fetch, refs.lhs, refs.gathered, refs.pulled, refs.pulled_full)


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
    widths, of_result = results_widths(rhs, options), result_tile(shape, options)
    kernel = _Kernel(
        gather=gather,
        options=options,
        taken=beside.of(options.epilogue, arrays),
        columns=Segments.of(widths, of_result.tile_n),
        of_result=of_result,
        scaling=scaling,
    )
    made = [
        padding.made_columns(n, width, options.out_dtype, shape)
        for n, width in zip(wanted, widths, strict=True)
    ]
    outs = [jax.ShapeDtypeStruct((*gather.out_rows, n), options.out_dtype) for n in made]
    kept, pulled = _gathered(gather, call.config.pull_slots, lhs.dtype)
    results = fuse(
        kernel.parts,
        name=name,
        team=team,
        mainloop=mainloop_of(shape, _product(kernel, lhs, rhs, outs)),
        num_tiles=gather.order.num_tiles,
        sharing=sharing_of(shape, gather.k_tiles),
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            beside=beside.all_in_memory(arrays, outs, of_result, gather.shards),
            **({} if scaling is None else scaling.operands()),
        ),
        outs=dict(outs=outs, **kept),
        semaphores=dict(received=SemaphoreArray(gather.received, local=True, restored=True)),
        buffers=pulled,
        waits=True,
        compiler_params=kernel.compiler_params,
        interpret=call.interpret,
    )
    if not options.return_gathered:
        return results["outs"]
    return [*results["outs"], gather.complete(results["gathered"], lhs)]


def _gathered(
    gather: Gather, slots: int, dtype: Any
) -> tuple[dict[str, jax.ShapeDtypeStruct], list[Buffers]]:
    """What is gathered, by name, and the buffers that pieces of it are pulled through."""
    kept = dict(gathered=jax.ShapeDtypeStruct(gather.gathered, dtype))
    pulled = [Buffers(slots, *gather.fetch.piece, dtype)]
    if (scales := gather.scales) is not None and scales.fetch is not None:
        kept["gathered_scales"] = jax.ShapeDtypeStruct(scales.shape, jnp.float32)
        pulled.append(Buffers(slots, *scales.fetch.piece, jnp.float32, name="pulled_scales"))
    return kept, pulled


def _product(
    kernel: _Kernel, lhs: jax.Array, rhs: Sequence[jax.Array], outs: Sequence[Any]
) -> Product:
    """The types of what is multiplied, and which edges tiles cross."""
    transposed = kernel.options.rhs_transposed
    matrices = [_matrix(x, transposed) for x in rhs]
    return Product(
        lhs=lhs.dtype,
        rhs=rhs[0].dtype,
        out=kernel.options.out_dtype,
        rhs_transposed=transposed,
        scales=None if kernel.scaling is None else kernel.scaling.granularity,
        beside=kernel.taken,
        **padding.edges(kernel.shape, lhs=lhs, rhs=matrices, out=outs),
    )


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
