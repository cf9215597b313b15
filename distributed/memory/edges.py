"""Refuses stores of a kernel that continue past an edge of their array (`windows`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from stretto.distributed.memory import windows
from stretto.distributed.memory.windows import Extent, Layout
from stretto.distributed.sites import Site, site_of


@dataclasses.dataclass(frozen=True)
class Store:
    """A bulk store of a kernel: its window of an array of `shape`, and how shared memory has it."""

    site: Site
    shape: tuple[int, ...]
    window: list[Extent]
    layout: Layout

    @property
    def is_flat(self) -> bool:
        """Whether it is one flat copy."""
        return windows.is_flat(self.shape, self.window, self.layout)


def check_stores(jaxpr: Any, kernel: str) -> None:
    """Raises ValueError for a store in `jaxpr`, of `kernel`, that may continue past an edge.

    A start that is known in the kernel only is taken for a multiple of the window's size; the
    simulator finds those that are not.
    """
    for store in stores(jaxpr):
        edge = windows.edge_that_is_run_over(store.shape, store.window, store.layout)
        if edge is None:
            continue
        sizes, size = tuple(extent.size for extent in store.window), store.shape[edge]
        raise ValueError(
            f"kernel {kernel}: a window of {sizes} is stored to an array of {store.shape}, at"
            f" {store.site}. It is contiguous there, so Mosaic GPU makes one flat copy of it,"
            f" which is not cut off where it reaches over the edge of dimension {edge}, of {size}"
            f" elements, but continues into what follows. Use windows whose size there divides"
            f" {size}, or narrower ones, which are not contiguous, or shared memory that is"
            " swizzled."
        )


def stores(jaxpr: Any) -> Iterator[Store]:
    """The stores of plain windows that do not reduce, in a jaxpr and in those within it."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name != "copy_smem_to_gmem" or eqn.params["reduction_op"] is not None:
            continue
        shape = tuple(eqn.invars[1].aval.shape)
        source, target = _transforms(eqn)
        window = _window(shape, target)
        if window is not None:
            yield Store(site_of(eqn), shape, window, Layout.of(source))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr, and of the jaxprs within it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for param in eqn.params.values():
            for value in param if isinstance(param, tuple | list) else (param,):
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    yield from equations(value)


def _transforms(eqn: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Those of the shared and of the global memory of a store."""
    source, target = (eqn.params[f"{name}_transforms_treedef"] for name in ("src", "dst"))
    leaves = eqn.invars[2:]
    return (
        source.unflatten(leaves[: source.num_leaves]),
        target.unflatten(leaves[source.num_leaves : source.num_leaves + target.num_leaves]),
    )


def _window(shape: Sequence[int], transforms: Sequence[Any]) -> list[Extent] | None:
    """The window that indexers, one after another, name; None if it is no plain one."""
    window = [Extent(0, size) for size in shape]
    for transform in transforms:
        if type(transform).__name__ != "NDIndexer":
            continue  # Whose memory it is. Mosaic GPU knows no others of global memory.
        indices = iter(transform.indices)
        for dim, extent in enumerate(window):
            if extent.squeezed:
                continue
            index = next(indices)
            if hasattr(index, "size") and hasattr(index, "stride"):
                if index.stride != 1 or not isinstance(index.size, int):
                    return None
                window[dim] = Extent(_sum(extent.start, index.start), index.size)
            elif getattr(getattr(index, "aval", None), "shape", ()):
                return None  # A scatter to the rows of a list.
            else:
                window[dim] = Extent(_sum(extent.start, index), 1, squeezed=True)
    return window


def _sum(start: int | None, index: Any) -> int | None:
    """`start + index`, None unless both are known."""
    value = getattr(index, "val", index)
    known = start is not None and hasattr(value, "__index__")
    return start + value.__index__() if known else None
