"""Trees of arrays in a collective: those of one type are moved together, in one launch.

Each array is seen as parts, `[parts, ...]`, which is what a device sends to each of the others, or
as the only one. Parts are joined side by side, which copies them, and taken apart again. XLA, which
joins its collectives itself, gets the arrays one by one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.operations import other_numbers
from stretto.kernels.problem import checks

type Parts = Callable[[jax.Array], jax.Array]
type Together = Callable[[jax.Array], jax.Array | None]


def is_tree(x: Any) -> bool:
    """Whether `x` is several arrays, or one in a container."""
    return isinstance(x, tuple | list | dict) or (
        not hasattr(x, "shape") and jax.tree.structure(x) != jax.tree.structure(0)
    )


def move(
    op: str,
    tree: Any,
    alone: Callable[[jax.Array], jax.Array],
    together: Together,
    to_parts: Parts,
    from_parts: Callable[[jax.Array, jax.Array], jax.Array],
) -> Any:
    """`alone` of every array in `tree`, by one call of `together` for each type where it serves.

    Args:
      op: the operation's name, for errors.
      tree: of arrays.
      alone: the collective of one array.
      together: the same of parts side by side, `[parts, elements]`; None where XLA serves.
      to_parts: an array -> its parts, `[parts, ...]`.
      from_parts: (what became of its parts, `[parts, elements]`, the array) -> its result.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for place, x in enumerate(leaves):
        checks.check_array(op, "x", x)
        groups[x.dtype].append(place)
    results: dict[int, jax.Array] = {}
    for places in groups.values():
        xs = [leaves[place] for place in places]
        few = len(xs) == 1 or other_numbers.are_needed(xs[0])
        moved = None if few else _together(xs, together, to_parts)
        if moved is None:
            found = [alone(x) for x in xs]
        else:
            found = [from_parts(part, x) for part, x in zip(moved, xs, strict=True)]
        results.update(zip(places, found, strict=True))
    return jax.tree.unflatten(structure, [results[place] for place in range(len(leaves))])


def _together(
    xs: Sequence[jax.Array], together: Together, to_parts: Parts
) -> list[jax.Array] | None:
    parts = [to_parts(x) for x in xs]
    flat = [x.reshape(x.shape[0], -1) for x in parts]
    out = together(jnp.concatenate(flat, axis=1))
    if out is None:
        return None
    ends = [math.prod(x.shape[1:]) for x in parts]
    bounds = [sum(ends[:i]) for i in range(1, len(ends))]
    return jnp.split(out, bounds, axis=1)
