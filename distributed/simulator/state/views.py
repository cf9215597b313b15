"""From a ref and its transforms, as a jaxpr has them, to the region of a buffer that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.distributed.simulator.reports.errors import KernelFaultError, UnsupportedKernelError
from stretto.distributed.simulator.state.memory import Buffer, Region
from stretto.distributed.simulator.state.packing import PackedView, is_packed
from stretto.distributed.simulator.state.tiled_alias import TiledView

# Layout only: they move elements within a buffer and change none.
_LAYOUT = {
    "UntilingTransform", "UnswizzleRef", "MemorySpaceCastTransform", "IdentityTransform",
    "ExpandLeadingBatchDimensionsTransform",
}  # fmt: skip

type Slot = Callable[[list], Any]


@dataclass
class ViewPlan:
    """How to find the region that a ref and its transforms name, prepared once per equation.

    Attributes:
      ref: reads the ref from an environment.
      steps: ("index", dims), ("reshape", shape), ("transpose", permutation) or ("bitcast", dtype),
        in order. Each dim is an int slot, or (start slot, size, stride).
      peer: reads the linear index of the device whose memory is meant; None for the own one.
      multicast: mesh axes along which every device's memory is meant; None for one device.
      cluster: (axis names, index slots) of the block in the cluster that is meant.
      alias: (dtype, logical shape, byte offset) in a union.
      tiling: of the alias.
    """

    ref: Slot
    steps: list[tuple[str, Any]] = field(default_factory=list)
    peer: Callable[[Any, list], int] | None = None
    multicast: tuple | None = None
    cluster: tuple[tuple, tuple[Slot, ...]] | None = None
    alias: tuple[np.dtype, tuple[int, ...], int] | None = None
    tiling: tuple[int, ...] = ()

    def region(self, task: Any, env: list) -> Region:
        """The one region meant; an error if it leaves the buffer."""
        buffer = self.owner(task, env)
        return self.within(buffer, env)

    def owner(self, task: Any, env: list) -> Any:
        """The buffer (or semaphores, or barriers) meant, after the choice of device and block."""
        ref = self.ref(env)
        if self.peer is not None:
            ref = task.machine.on_device(ref, self.peer(task, env))
        if self.cluster is not None:
            names, slots = self.cluster
            ref = task.machine.in_cluster(
                task, ref, dict(zip(names, (s(env) for s in slots), strict=True))
            )
        return ref

    def owners(self, task: Any, env: list) -> list:
        """The buffers meant, one a device of a multicast."""
        ref = self.owner(task, env)
        if self.multicast is None:
            return [ref]
        devices = task.machine.mesh.along(task.device.index, self.multicast)
        return [task.machine.on_device(ref, d) for d in devices]

    def within(self, buffer: Buffer, env: list) -> Region:
        """The region of `buffer`, which must be inside it."""
        region, overhang = self.clipped(buffer, env)
        if overhang is not None:
            raise KernelFaultError(
                f"access out of bounds: {buffer.describe()} has shape {buffer.data.shape}, and the"
                f" access reaches past it: {region.describe()} is what remains inside."
            )
        return region

    def clipped(self, buffer: Buffer, env: list) -> tuple[Region, tuple | None]:
        """The part of the region that is inside the buffer, and where it lies in the whole.

        Returns:
          The region, and None if all of it is inside; else (shape of the whole, index of the part).
        """
        steps: list[Any] = []
        shape = buffer.data.shape
        if self.alias is not None:
            shape = self.alias[1]
            steps.append(_alias_step(*self.alias, buffer.cells_per_byte, self.tiling))
        dims: list | None = None
        for kind, arg in self.steps:
            if kind == "index":
                dims = _compose(dims, shape, arg, env)
                continue
            if dims is not None:
                index, overhang, _ = _finish(dims, shape)
                if overhang is not None:
                    raise KernelFaultError(
                        f"access out of bounds of {buffer.describe()}, shape {shape}"
                    )
                shape = _indexed_shape(index, shape)
                steps.append(_index_step(index))
                dims = None
            step, shape = _other_step(kind, arg, shape)
            steps.append(step)
        if dims is None:
            return Region(buffer, tuple(steps), Ellipsis), None
        return _bounded(buffer, steps, dims, shape)

    def plain_window(self, buffer: Buffer, env: list) -> list | None:
        """The window in coordinates of `buffer`: for each dimension an int or [start, size, 1].

        None if it is anything else, such as rows of a list, or the whole.
        """
        if self.alias is not None or {kind for kind, _ in self.steps} != {"index"}:
            return None
        dims: list = [[0, n, 1] for n in buffer.data.shape]
        for _, arg in self.steps:
            dims = _compose(dims, buffer.data.shape, arg, env)
        plain = all(isinstance(d, int) or (isinstance(d, list) and d[2] == 1) for d in dims)
        return dims if plain else None

    def bounded(self, buffer: Buffer, dims: list) -> tuple[Region, tuple | None]:
        """What `clipped` returns, of a window as `plain_window` has it."""
        return _bounded(buffer, [], dims, buffer.data.shape)


def _bounded(
    buffer: Buffer, steps: list[Callable], dims: list, shape: tuple
) -> tuple[Region, tuple | None]:
    index, overhang, whole = _finish(dims, shape)
    return Region(buffer, tuple(steps), index), None if overhang is None else (whole, overhang)


def _compose(dims: list | None, shape: tuple, indexer: list, env: list) -> list:
    """Adds one indexer to `dims`, a list per dimension of an int, an array or [start, size, step].

    Indexers compose in coordinates of the array that they start from, as TMA sees them: a slice of
    a slice may reach past the slice, but not past the array.
    """
    if dims is None:
        dims = [[0, n, 1] for n in shape]
    out, left = [], iter(indexer)
    for dim in dims:
        if not isinstance(dim, list):
            out.append(dim)
            continue
        what = next(left)
        if isinstance(what, tuple):
            start, size, stride = what
            begin = int(start(env))
            count = size if isinstance(size, int) else int(size(env))
            out.append([dim[0] + dim[2] * begin, count, dim[2] * stride])
        else:
            position = what(env)
            if isinstance(position, np.ndarray) and position.ndim:
                out.append(dim[0] + dim[2] * position.astype(np.int64))
            else:
                out.append(dim[0] + dim[2] * int(position))
    return out


def _finish(dims: list, shape: tuple) -> tuple[tuple, tuple | None, tuple]:
    """The index that `dims` mean, clipped to `shape`.

    Returns:
      The index; None if nothing was clipped, else the index of what is left within the whole; and
      the shape of the whole.
    """
    index, part, whole, clipped = [], [], [], False
    for dim, n in zip(dims, shape, strict=True):
        if isinstance(dim, list):
            start, size, step = dim
            low = max(0, -(start // step)) if start < 0 else 0
            high = min(size, max(low, -(-(n - start) // step)))
            high = max(low, high)
            inside = slice(start + low * step, start + high * step, step)
            index.append(inside if high > low else slice(0, 0, 1))
            part.append(slice(low, high))
            whole.append(size)
            clipped |= high - low != size
        elif isinstance(dim, np.ndarray):
            if dim.size and (dim.min() < 0 or dim.max() >= n):
                raise KernelFaultError(f"index {dim.min()}..{dim.max()} is outside 0..{n - 1}")
            index.append(dim)
        else:
            if not 0 <= dim < n:
                raise KernelFaultError(f"index {dim} is outside 0..{n - 1}, shape {shape}")
            index.append(dim)
    return tuple(index), tuple(part) if clipped else None, tuple(whole)


def _indexed_shape(index: tuple, shape: tuple) -> tuple:
    if any(isinstance(i, np.ndarray) for i in index):
        return np.empty(shape, np.bool_)[index].shape
    return tuple(
        len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True) if isinstance(i, slice)
    )


def _index_step(index: tuple) -> Callable:
    if any(isinstance(i, np.ndarray) for i in index):
        raise UnsupportedKernelError("a transform after an index by arrays is not supported")
    return lambda array, bookkeeping: array[index]


def _alias_step(
    dtype: np.dtype, shape: tuple, offset: int, cells_per_byte: int, tiling: tuple[int, ...]
) -> Callable | TiledView:
    if is_packed(dtype):
        return PackedView(dtype, shape, offset, cells_per_byte)
    if tiling and shape[-1] != tiling[-1]:  # Else tiles lie below each other, as rows do.
        return TiledView(dtype, shape, offset, cells_per_byte, tiling)
    size = int(np.prod(shape)) * dtype.itemsize

    def step(array: np.ndarray, bookkeeping: bool) -> np.ndarray:
        if bookkeeping:  # The last axis is the marks of an element.
            marks = array[offset * cells_per_byte : (offset + size) * cells_per_byte]
            return marks.reshape((*shape, dtype.itemsize * cells_per_byte))
        return array[offset : offset + size].view(dtype).reshape(shape)

    return step


def _other_step(kind: str, arg: Any, shape: tuple) -> tuple[Callable, tuple]:
    if kind == "reshape":
        old_rank, new_shape = len(shape), tuple(arg)

        def reshape(array: np.ndarray, bookkeeping: bool) -> np.ndarray:
            try:
                return np.reshape(array, (*new_shape, *array.shape[old_rank:]), copy=False)
            except ValueError as error:
                raise UnsupportedKernelError(
                    f"reshape of a strided ref from {array.shape} to {new_shape}"
                ) from error

        return reshape, new_shape
    if kind == "transpose":
        perm = tuple(arg)

        def transpose(array: np.ndarray, bookkeeping: bool) -> np.ndarray:
            return array.transpose((*perm, *range(len(perm), array.ndim)))

        return transpose, tuple(shape[p] for p in perm)
    raise UnsupportedKernelError(f"ref transform {kind} is not supported")


def plan_view(compiler: Any, ref_atom: Any, transforms: Any) -> ViewPlan:
    """Prepares the view of the ref `ref_atom` of a jaxpr through `transforms`, or None of them.

    `transforms` hold the jaxpr's own variables where they are dynamic.
    """
    plan = ViewPlan(compiler.reader(ref_atom))
    pending_alias: tuple | None = None
    for transform in transforms or ():
        name = type(transform).__name__
        if name == "ExtractAliasedRef":
            pending_alias = (np.dtype(transform.dtype), tuple(transform.shape), transform.offset)
            plan.alias = pending_alias
        elif name in _LAYOUT:
            if name == "UntilingTransform" and plan.alias is not None:
                dtype, shape, offset = plan.alias
                plan.alias = (dtype, _untiled(shape, transform.tiling), offset)
                plan.tiling = tuple(transform.tiling)
        elif name == "NDIndexer":
            plan.steps.append(("index", [_dim(compiler, i) for i in transform.indices]))
        elif name == "ReshapeTransform":
            plan.steps.append(("reshape", transform.shape))
        elif name == "TransposeTransform":
            plan.steps.append(("transpose", transform.permutation))
        elif name == "PeerMemRef":
            plan.peer = compiler.device_reader(transform.device_id, transform.device_id_type)
        elif name == "MulticastRef":
            plan.multicast = compiler.multicast_axes(transform.collective_axes)
        elif name == "ClusterRefTransform":
            slots = tuple(compiler.reader(i) for i in transform.idxs)
            plan.cluster = (tuple(transform.dims), slots)
        else:
            raise UnsupportedKernelError(f"ref transform {name} is not supported")
    return plan


def _untiled(shape: tuple, tiling: tuple) -> tuple:
    """The logical shape of an array stored as tiles."""
    rank = len(tiling)
    lead, tiles = shape[: -2 * rank], shape[-2 * rank : -rank]
    return (*lead, *(n * t for n, t in zip(tiles, tiling, strict=True)))


def _dim(compiler: Any, index: Any) -> Any:
    """One dimension of an indexer: a reader of an int, or (start reader, size, stride)."""
    if type(index).__name__ == "Slice":
        size = index.size if isinstance(index.size, int) else compiler.reader(index.size)
        return compiler.reader(index.start), size, int(index.stride)
    return compiler.reader(index)
