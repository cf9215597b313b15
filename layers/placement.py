"""Runs a layer's body on one device's shards, inside `jax.shard_map` and outside.

- Inside a `jax.shard_map` over the team, arrays are shards already.
- In global-view code with a mesh, one `shard_map` of all its axes encloses the body, since kernels
  need every axis to be manual. It may stand inside others.
- Without a mesh there is no team: the body computes on whole arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.distributed.devices.axes import canonical_axes
from stretto.layers.parallel import Parallel, names_of

type Split = Literal["tokens", "features"]
type Body = Callable[..., Any]


def on_devices(
    body: Body,
    how: Parallel,
    x: Any,
    others: Sequence[Any],
    specs: Sequence[Any],
    *,
    enters: Split,
    leaves: Split,
    counts: bool = False,
) -> Any:
    """`body(how, x, *others)` on each device's shards; `body(None, x, *others)` without a team.

    Args:
      body: the layer on one device.
      how: the sharding of the layer.
      x: activations `[..., features]`; or a tuple of such, with equally many tokens.
      others: trees of arrays: weights, masks.
      specs: their sharding over the team, trees of `PartitionSpec`s of the same structure.
      enters, leaves: the dimension that the team splits of `x`, and of the result: "tokens" (with
        `how.sequence_parallel`; otherwise none) or "features".
      counts: `body` also returns counts, equal on all devices of its team. They are added up over
        the other axes of the tokens.

    Raises:
      ValueError: the mesh lacks the team's axes, or the team cannot split x.
    """
    if _is_bound(how):
        return body(how, x, *others)
    mesh = _mesh_of(how, [x, *others])
    if mesh is None:
        return body(None, x, *others)
    _check_axes(how, mesh)
    first = x[0] if isinstance(x, tuple) else x
    how.tokens_of(first)
    free = set(mesh.axis_names) - set(getattr(mesh, "manual_axes", ()))
    rest = _dimensions_besides(how, first, mesh, free)
    entering = _spec(how, rest, enters)
    operands = (x, *others)
    in_specs = (tuple(entering for _ in x) if isinstance(x, tuple) else entering, *specs)
    leaving = _spec(how, rest, leaves)
    _check_split(operands, in_specs, mesh)
    if mesh.explicit_axes:  # where operands must have the sharding `in_specs`
        operands = jax.tree.map(
            lambda y, spec: jax.sharding.reshard(
                y, NamedSharding(mesh, _only(spec, mesh.explicit_axes))
            ),
            operands,
            in_specs,
        )
    return jax.shard_map(
        functools.partial(_of_all_teams(body, rest) if counts else body, how),
        mesh=None if _enclosing() is not None else mesh,
        in_specs=in_specs,
        out_specs=(leaving, P()) if counts else leaving,
        axis_names=free,
        check_vma=False,
    )(*operands)


def _of_all_teams(body: Body, rest: Sequence[tuple[Hashable, ...]]) -> Body:
    """`body`, with counts added up over the other axes of the tokens, `rest`."""
    besides = tuple(name for entry in rest for name in entry)

    def added(*operands: Any) -> tuple[Any, Any]:
        out, counted = body(*operands)
        return out, lax.psum(counted, besides) if besides else counted

    return added


def _is_bound(how: Parallel) -> bool:
    """Whether a `shard_map` over the team encloses the layer.

    Raises:
      ValueError: over some of its axes.
    """
    bound = []
    for name in how.axes:
        try:
            canonical_axes(name)
            bound.append(name)
        except ValueError:
            pass
    if bound and len(bound) < len(how.axes):
        raise ValueError(
            f"axis_name={how.axis_name!r}: the enclosing shard_map has {bound} alone; give it all"
            " axes of the team, or none."
        )
    return bool(bound)


def _enclosing() -> Any | None:
    found = jax.sharding.get_abstract_mesh()
    return None if found.empty else found


def _mesh_of(how: Parallel, operands: Sequence[Any]) -> Any | None:
    """The enclosing mesh, the layer's own, or the mesh of the arrays."""
    found = _enclosing()
    if found is not None or how.mesh is not None:
        return how.mesh if found is None else found
    for y in jax.tree.leaves(operands):
        found = None if isinstance(y, Tracer) else getattr(y, "sharding", None)
        if isinstance(found, NamedSharding):
            return found.mesh
    if how.backend not in ("auto", "xla"):
        raise ValueError(
            f"backend={how.backend!r} needs a mesh, and none is known here; enclose the call in"
            " jax.set_mesh or jax.shard_map, or pass Parallel(mesh=...)."
        )
    return None


def _check_axes(how: Parallel, mesh: Any) -> None:
    missing = [name for name in (*how.axes, *names_of(how.batch_axes)) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"Parallel names {missing}, and the mesh has the axes {tuple(mesh.axis_names)}; pass"
            " axis_name and batch_axes of those."
        )


def _check_split(operands: Any, specs: Any, mesh: Any) -> None:
    def check(y: jax.Array, spec: P) -> None:
        for i, names in enumerate(map(names_of, spec)):
            devices = math.prod(mesh.shape[name] for name in names)
            if y.shape[i] % devices:
                raise ValueError(
                    f"dimension {i} of an operand {y.shape} must be a multiple of the {devices}"
                    f" devices along {names}, which split it; pass other sizes, another mesh, or"
                    " another token_axis, batch_axes or sequence_parallel."
                )

    jax.tree.map(check, operands, specs)


def _dimensions_besides(
    how: Parallel, x: jax.Array, mesh: Any, free: Collection[Hashable]
) -> list[tuple[Hashable, ...]]:
    """For each dimension of x, the axes over which it is sharded, without the team's."""
    entries: list[tuple[Hashable, ...]] = [()] * x.ndim
    if mesh.explicit_axes:
        for i, entry in enumerate(jax.typeof(x).sharding.spec[:-1]):
            entries[i] = tuple(name for name in names_of(entry) if name not in how.axes)
    known = {name for entry in entries for name in entry}
    batch = [name for name in names_of(how.batch_axes) if name in free and name not in known]
    entries[0] = (*entries[0], *batch)
    return entries


def _spec(how: Parallel, rest: Sequence[tuple[Hashable, ...]], split: Split) -> P:
    entries = list(rest)
    if split == "features":
        entries[-1] = how.axes
    elif how.sequence_parallel:
        entries[how.token_axis] = (*entries[how.token_axis], *how.axes)
    return P(*(entry or None for entry in entries))


def _only(spec: P, axes: Collection[Hashable]) -> P:
    """`spec` with no other axes than `axes`."""
    kept = (tuple(name for name in names_of(entry) if name in axes) for entry in spec)
    return P(*(entry or None for entry in kept))
