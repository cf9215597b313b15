"""A team: the devices that run a kernel together, along one or more axes of the mesh."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Generator, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames, canonical_axes
from stretto.distributed.primitives import heap_semaphores
from stretto.distributed.private_jax import marks

# Set while the body of a kernel is traced: whether it counts its devices from the other end
# (`clique`). None outside.
_reversed: contextvars.ContextVar[bool | None] = contextvars.ContextVar("reversed", default=None)


@contextlib.contextmanager
def places_reversed(enabled: bool) -> Generator[None]:
    """Around the body of a kernel while it is traced.

    If `enabled`, the devices' places along mesh axes are those of the reversed mesh.
    """
    token = _reversed.set(enabled)
    try:
        yield
    finally:
        _reversed.reset(token)


def are_reversed() -> bool:
    """Whether the kernel whose body is being traced counts its devices from the end."""
    return bool(_reversed.get())


@dataclasses.dataclass(frozen=True)
class Team:
    """The devices along `axes` of the enclosing `shard_map`'s mesh, all within NVLink reach.

    A member is known by its `device_id`, its position along `axes` in row-major order, from 0 to
    `size - 1`. Devices that differ in any other axis of the mesh belong to other teams, which run
    the same kernel beside this one and are never addressed.
    """

    axes: tuple[Hashable, ...]
    size: int

    @classmethod
    def along(cls, axis_name: AxisNames) -> Team:
        """The team along `axis_name`, one mesh axis or a tuple of them.

        Raises:
          ValueError: outside `shard_map`, or an axis is unknown or named twice.
          NotImplementedError: some axes of the mesh are left to the compiler (partial `shard_map`).
        """
        axes = canonical_axes(axis_name)
        mesh = jax.sharding.get_abstract_mesh()
        automatic = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
        if automatic:
            raise NotImplementedError(
                f"kernels need every mesh axis to be manual and {automatic} are not; leave"
                " axis_names out of shard_map, or pass backend='xla'."
            )
        return cls(axes, lax.axis_size(axes))

    @property
    def is_alone(self) -> bool:
        """Whether the team has one device only, which needs no communication."""
        return self.size == 1

    def device_id(self) -> jax.Array:
        """This device's number within the team, int32; inside a kernel and outside.

        XLA connects a kernel that reads its place along a mesh axis with other devices,
        and a team of one must not be connected.
        """
        return jnp.int32(0) if self.is_alone else self._turned(self._place())

    def neighbour(self, offset: int) -> jax.Array:
        """Id of the member `offset` places further on the ring; `offset` may be negative."""
        if offset % self.size == 0:
            return self.device_id()
        return lax.rem(self.device_id() + offset % self.size, jnp.int32(self.size))

    def address(self, device_id: int | jax.Array) -> dict:
        """The name of member `device_id` for Pallas' remote operations.

        Axes that are not the team's are left out and so default to the caller's own position.
        """
        if len(self.axes) == 1:
            return {self.axes[0]: self._turned(device_id)}
        return {self.axes: self._turned(device_id)}

    def slot(self, device_id: int | jax.Array) -> jax.Array:
        """The slot of member `device_id` in the `heap`; inside a kernel only."""
        return heap_semaphores.slot(self.address(device_id), reverse=are_reversed())

    def _place(self) -> jax.Array:
        """Along the axes, as the kernel counts that is being traced."""
        if _reversed.get() is None:
            return lax.axis_index(self.axes)
        place, *others = (marks.place(lax.axis_index(axis)) for axis in self.axes)
        for axis, index in zip(self.axes[1:], others, strict=True):
            place = place * lax.axis_size(axis) + index
        return place

    def _turned(self, place: int | jax.Array) -> Any:
        return self.size - 1 - place if are_reversed() else place

    @functools.cached_property
    def peer_offsets(self) -> tuple[int, ...]:
        """1 to `size - 1`: ring distances of the peers, nearest first.

        In a loop over it, device `d` reaches `d + 1`, `d + 2`, ...: at each step every device has a
        different peer, so no link carries two streams.
        """
        return tuple(range(1, self.size))
