"""Teams that span nodes: which part of an operation is a kernel's, and in which pieces.

Kernels join the devices of one node (`topology`). An operation over `("node", "gpu")` is therefore
a fused operation over "gpu" and XLA's collectives over "node", in pieces: while one
piece crosses between nodes, a kernel works on the one before. The files `hierarchical_*.py` use
this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed import schedule
from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.devices.topology import Split

# The most pieces into which the traffic with other nodes is divided.
MOST_PIECES = 4
# Below it a kernel of a matmul would not fill a device, or a collective not pay for its launch.
LEAST_ROWS = 2048
LEAST_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes that a team spans, and its devices on each: `split` with sizes.

    A device's place in the team is `node_id() * devices` and its place among its node's devices.
    """

    outer: tuple[Hashable, ...]
    inner: tuple[Hashable, ...]
    count: int
    devices: int

    @classmethod
    def of(cls, split: Split) -> Nodes:
        """Those of the enclosing `shard_map`'s mesh."""
        count, devices = (int(lax.axis_size(axes)) for axes in (split.outer, split.inner))
        return cls(split.outer, split.inner, count, devices)

    @property
    def shifts(self) -> Sequence[int]:
        """1 to `count - 1`: how far the other nodes are."""
        return range(1, self.count)

    def node_id(self, shift: int = 0) -> jax.Array:
        """The number of the node `shift` places after this device's own, int32."""
        return lax.rem(lax.axis_index(self.outer) + shift % self.count, jnp.int32(self.count))

    def move(self, x: jax.Array, shift: int) -> jax.Array:
        """`x` of the same device of the node `shift` places before this one."""
        pairs = [(node, (node + shift) % self.count) for node in range(self.count)]
        return lax.ppermute(x, self.outer, pairs)

    def cut(self, size: int, most: int, multiple: int = 64) -> list[tuple[int, int]]:
        """`size` rows for or from another node as `pieces_of`, `most` for all nodes together."""
        return pieces_of(size, max(1, most // (self.count - 1)), multiple)


def pieces_of(size: int, count: int, multiple: int = 64) -> list[tuple[int, int]]:
    """`size` rows in at most `count` about equal pieces, (first, end) of each.

    All but the last are of a multiple of `multiple` rows.
    """
    step = schedule.ceil_div(schedule.ceil_div(size, count), multiple) * multiple
    return [(first, min(first + step, size)) for first in range(0, size, step)]


def most_pieces(size: int, least: int, asked: int | None = None) -> int:
    """Into how many pieces `size` may be cut so that none is much below `least`."""
    return asked or min(MOST_PIECES, max(1, size // least))


def place(whole: jax.Array, part: jax.Array, *start: int | jax.Array) -> jax.Array:
    """`whole` with `part` from `start` on; further dimensions start at 0."""
    starts = [jnp.int32(s) for s in (*start, *[0] * (whole.ndim - len(start)))]
    return lax.dynamic_update_slice(whole, part, starts)


def room_for(shape: tuple[int, ...], part: jax.Array) -> jax.Array:
    """An array to be filled with `place`, of the type of its parts."""
    return make_varying(lax.empty(shape, part.dtype), varying_axes(part))
