"""`stretto.sharded`: an operation on whole arrays, which wraps itself in `jax.shard_map`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.kernels.operation import Operation
from stretto.kernels.operations import OPERATIONS

SCALES = ("lhs_scale", "rhs_scale")
"""Of the operands, in their order."""


def sharded(
    operation: Callable[..., Any],
    *,
    mesh: Any = None,
    in_specs: Sequence[Any] | None = None,
    out_specs: Any = None,
) -> Callable[..., Any]:
    """`operation` on whole arrays, outside of `jax.shard_map`.

    `stretto.sharded(stretto.all_gather_matmul)(x, w, "tp")` is `x @ w`, for `x` with rows sharded
    over "tp". Other axes of the operands' sharding, such as a batch over "dp", are kept. Scales
    (`lhs_scale=`, `rhs_scale=`) are whole arrays, too, and are split as their operands.

    Args:
      operation: a public operation over a team, such as `stretto.all_gather_matmul`.
      mesh: by default that of the operands, or the enclosing one (`jax.set_mesh`).
      in_specs: the sharding of each operand, in the order of `operation`'s parameters, a spec each
        (or, for a tuple of matrices or another tree, a tree of specs), then of other arrays that
        are passed by name, such as biases. By default that of their types, on a mesh of
        `AxisType.Explicit`, or of the arrays outside of `jax.jit`.
      out_specs: the sharding of the results; for the matmuls and the operations on experts, by
        default derived from the operands.

    Returns:
      A function of what `operation` takes.

    Raises:
      ValueError: `operation` is none over a team; from the function, where a mesh or a spec is
        missing, the mesh lacks an axis of the team, a `shard_map` over one encloses the call, or
        the operands do not lie as the operation takes them: what is gathered along the team, a
        contraction that is summed along the team in both operands, any other one along no axis.
      TypeError: from the function, for an argument that is missing or that `operation` lacks.
    """
    records = [r for r in OPERATIONS.values() if r.public is operation and r.communicates]
    if not records:
        raise ValueError(f"{operation!r} is not an operation of Stretto over a team of devices.")
    record = records[0]

    def call(*arguments: Any, **keywords: Any) -> Any:
        operands, options = _apart(record, arguments, keywords)
        count, name = len(operands), options["axis_name"]
        axes = tuple(name) if isinstance(name, tuple | list) else (name,)
        scales = {key: options.pop(key) for key in SCALES if options.get(key) is not None}
        named = [key for key, x in options.items() if _are_arrays(x)]
        plain = {key: x for key, x in options.items() if key not in named}
        every = (*operands, *(options[key] for key in named))
        found = _specs(record, every, in_specs)
        where = _mesh_of(record, mesh, every)
        _check_axes(record, axes, where)
        of_scales = [
            _specs_of_scales(operands[SCALES.index(key)], found[SCALES.index(key)], scale)
            for key, scale in scales.items()
        ]
        out = out_specs if out_specs is not None else _layout(record, found, axes, options)

        def on_a_device(*xs: Any) -> Any:
            own = dict(zip((*named, *scales), xs[count:], strict=True))
            results = operation(*xs[:count], **own, **plain)
            if record.joined is None:
                return results
            return record.joined(results, xs[: len(every)], found, axes)

        return jax.shard_map(
            on_a_device,
            mesh=where,
            in_specs=(*found, *of_scales),
            out_specs=out,
            check_vma=False,
        )(*every, *scales.values())

    return call


def _apart(
    record: Operation, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(the operands, which come before the axis, lists of them as tuples; the other arguments).

    Raises:
      TypeError: an argument is missing, or the operation has none of such a name.
    """
    signature = inspect.signature(record.public)
    try:
        options = signature.bind(*arguments, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"{record.name}: {error}.") from None
    names = list(signature.parameters)
    operands = [options.pop(name) for name in names[: names.index("axis_name")]]
    return tuple(tuple(x) if isinstance(x, list) else x for x in operands), options


def _specs_of_scales(operand: Any, spec: Any, scale: Any) -> Any:
    """How scales lie: as their operand does, but for dimensions along which there is one."""
    if isinstance(operand, tuple | list):
        each = zip(operand, spec, scale, strict=True)
        return type(scale)(_specs_of_scales(*one) for one in each)
    if scale is None or np.ndim(scale) == 0:  # A missing one is 1.
        return P()
    return P(*(None if size == 1 else x for size, x in zip(scale.shape, spec, strict=True)))


def _are_arrays(x: Any) -> bool:
    """Whether a keyword argument is an array or a tuple of some, such as biases.

    A scalar of NumPy is a number, which an operation may have to know when it is traced.
    """
    parts = x if isinstance(x, tuple | list) else (x,)
    return bool(parts) and all(
        isinstance(part, jax.Array) or (isinstance(part, np.ndarray) and part.ndim > 0)
        for part in parts
    )


def _layout(record: Operation, specs: list, axes: tuple, options: dict) -> Any:
    """How the results lie.

    Raises:
      ValueError: it cannot be told from the operands, or these do not lie as those of one product.
    """
    if record.layout is None:
        raise ValueError(f"{record.name}: out_specs is missing; say how the result lies.")
    out = record.layout(specs, axes, options)
    for spec in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, P)):
        along = [name for x in spec if x is not None for name in (x if type(x) is tuple else (x,))]
        if twice := sorted({str(name) for name in along if along.count(name) > 1}):
            raise ValueError(
                f"{record.name}: two dimensions of the result would lie along {', '.join(twice)},"
                " whose devices would each have an unrelated part. Reshard an operand, or pass"
                " other in_specs."
            )
    return out


def _specs(record: Operation, operands: Sequence[Any], given: Any) -> list[Any]:
    """A spec of each operand, with an entry for each dimension.

    Raises:
      ValueError: `given` are not those of the operands, or an operand's sharding is not known.
    """
    if missing := [str(i) for i, xs in enumerate(operands) if xs is None]:
        raise ValueError(f"{record.name}: operand {', '.join(missing)} is None; pass an array.")
    if given is None:
        return [
            jax.tree.map(lambda x: _whole(record, _sharding(record, x).spec, x), xs)
            for xs in operands
        ]
    if isinstance(given, P) or not isinstance(given, tuple | list):
        raise ValueError(
            f"{record.name}: in_specs={given!r:.60} must be a tuple, with a spec for each of the"
            f" {len(operands)} operands."
        )
    if len(given) != len(operands):
        raise ValueError(
            f"{record.name}: in_specs has {len(given)} specs for {len(operands)} operands."
        )
    return [
        _specs_of(record, i, spec, xs)
        for i, (spec, xs) in enumerate(zip(given, operands, strict=True))
    ]


def _specs_of(record: Operation, index: int, spec: Any, xs: Any) -> Any:
    """A spec of each array of an operand, by one for all of them or by a tree of specs."""
    if isinstance(spec, P):
        return jax.tree.map(lambda x: _whole(record, spec, x), xs)
    spec = tuple(spec) if isinstance(spec, list) else spec
    leaves, tree = jax.tree.flatten(spec, is_leaf=lambda one: isinstance(one, P))
    if tree != jax.tree.structure(xs) or not all(isinstance(one, P) for one in leaves):
        raise ValueError(
            f"{record.name}: in_specs[{index}]={spec!r:.60} must be a PartitionSpec or, for an"
            " operand of several arrays, a tree of one for each."
        )
    return jax.tree.unflatten(
        tree,
        [_whole(record, one, x) for one, x in zip(leaves, jax.tree.leaves(xs), strict=True)],
    )


def _whole(record: Operation, spec: P, x: Any) -> P:
    """`spec` with an entry for each dimension of `x`."""
    missing = np.ndim(x) - len(spec)
    if missing < 0:
        raise ValueError(
            f"{record.name}: the spec {spec} has more entries than its operand of shape"
            f" {np.shape(x)} has dimensions."
        )
    return P(*spec, *[None] * missing)


def _sharding(record: Operation, x: Any) -> NamedSharding:
    """The sharding of `x`, from its type or, for a concrete array, from the array."""
    found = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(found, NamedSharding):
        found = jax.typeof(x).sharding
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"{record.name}: stretto.sharded takes whole arrays, and inside jax.shard_map an"
                f" operand of shape {x.shape} is a device's part; call the operation itself there."
            )
        if not found.mesh.explicit_axes:
            raise ValueError(
                f"{record.name}: how an operand of shape {x.shape} lies on the mesh is not known"
                " here; pass in_specs, or make the mesh of jax.sharding.AxisType.Explicit."
            )
    return found


def _check_axes(record: Operation, axes: Sequence[Any], mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError where the mesh lacks one of the team, or a `shard_map` encloses it."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{record.name}: axis {axis!r} is not among the mesh's axes {mesh.axis_names};"
                " use one of those."
            )
        if axis in manual:
            raise ValueError(
                f"{record.name}: stretto.sharded takes whole arrays, and jax.shard_map over"
                f" {axis!r} encloses it; call the operation itself there."
            )


def _mesh_of(record: Operation, given: Any, operands: Sequence[Any]) -> Mesh | AbstractMesh:
    """The given mesh, the enclosing one or that of the operands.

    Raises:
      ValueError: there is none, or `given` is none, or operands are on different meshes.
    """
    if isinstance(given, Mesh | AbstractMesh):
        return given
    if given is not None:
        raise ValueError(f"{record.name}: mesh={given!r:.60} must be a jax.sharding.Mesh.")
    enclosing = jax.sharding.get_abstract_mesh()
    if not enclosing.empty:
        return enclosing
    concrete = [x for x in jax.tree.leaves(operands) if not isinstance(x, Tracer)]
    shardings = [getattr(x, "sharding", None) for x in concrete]
    meshes = {found.mesh for found in shardings if isinstance(found, NamedSharding)}
    if len(meshes) > 1:
        several = " and ".join(sorted(str(dict(found.shape)) for found in meshes))
        raise ValueError(f"{record.name}: operands lie on several meshes, {several}; pass one.")
    for found in meshes:
        return found
    raise ValueError(f"{record.name}: mesh is missing; pass one, or enclose it in jax.set_mesh.")
