"""The devices of the mesh whose program is being traced.

`jax.shard_map` gives the body that it traces the axes of its mesh, and keeps the devices for later.
But whether a kernel can serve a call depends on their order. Here `shard_map` leaves the ids of
devices that are not the first ones in order where a trace finds them. They are part of the key of
JAX's caches. Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import mesh as mesh_lib
from jax._src import shard_map
from jax.sharding import Mesh

_ids = jax.make_user_context(default_value=None)
_extend_axis_env = shard_map._extend_axis_env


def unordered_ids() -> tuple[int, ...] | None:
    """Ids of the devices of the enclosing `shard_map`'s mesh, row-major, if they may be unordered.

    None where they count from 0, or where the mesh has no devices yet.
    """
    return _ids.value


@contextlib.contextmanager
def _extend_and_tell(mesh: Any, newly_manual_axes: Any) -> Iterator[None]:
    """Called by JAX around all that it does to the body of a `shard_map`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_extend_axis_env(mesh, newly_manual_axes))
        concrete = mesh if isinstance(mesh, Mesh) else mesh_lib.get_concrete_mesh()
        # A `shard_map` inside another may have none: its devices are those of the outer one.
        ids = () if concrete.empty else tuple(device.id for device in concrete.devices.flat)
        if ids != tuple(range(len(ids))):
            stack.enter_context(_ids(ids))
        yield


shard_map._extend_axis_env = _extend_and_tell
