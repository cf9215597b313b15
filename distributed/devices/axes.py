"""Mesh axis names as the public functions take them: one name, or a tuple of names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import jax
from jax import lax

from stretto.distributed.private_jax import types

type AxisNames = Hashable | Sequence[Hashable]


def canonical_axes(axis_name: AxisNames) -> tuple[Hashable, ...]:
    """`axis_name` as a tuple of distinct names, checked to be axes of the enclosing `shard_map`.

    Raises:
      ValueError: no `shard_map` encloses the call, an axis is unknown, or one is named twice.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names:
        raise ValueError("axis_name is empty; name at least one mesh axis.")
    for name in names:
        if not isinstance(name, Hashable):
            raise ValueError(f"axis_name={name!r} is no name; pass one, or a tuple of names.")
    if len(set(names)) != len(names):
        raise ValueError(f"axis_name={names} names an axis twice; name each once.")
    for name in names:
        try:
            lax.axis_size(name)
        # Of a number, which JAX takes for an array's axis, a ValueError; of a list, a TypeError.
        except (NameError, TypeError, ValueError):
            raise ValueError(_unknown_axis_message(name)) from None
    return names


def axis_size(axis_name: AxisNames) -> int:
    """Number of devices along `axis_name`: the product over the axes of a tuple."""
    return lax.axis_size(canonical_axes(axis_name))


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The axes of the enclosing `shard_map` that `x` is typed as varying over (`check_vma`)."""
    return types.varying_axes(x)


def make_varying(x: jax.Array, axes: Iterable[Hashable]) -> jax.Array:
    """`x`, typed as varying over `axes` too. Its values are untouched."""
    known = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(a for a in known if a in set(axes) - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _unknown_axis_message(name: Hashable) -> str:
    known = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not known:
        return (
            f"axis {name!r} is not bound: call this inside jax.shard_map over a mesh that has it."
        )
    return f"axis {name!r} is not among the enclosing shard_map's axes {known}; use one of those."
