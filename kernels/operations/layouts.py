"""The sharding of the matmuls' results, from that of their operands.

A device multiplies the shards that it has, so the shards must be those of a product: layouts whose
results would be addends, or sums of unrelated parts, are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from stretto.kernels.operations import epilogues
from stretto.kernels.problem import checks

type Axes = tuple[Hashable, ...]
type Arguments = Mapping[str, Any]


def of_gather(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> Any:
    """Of `all_gather_matmul`: the gathered dimension is no longer sharded over the team."""
    gather_axis = arguments.get("gather_axis", "m")
    lhs, rhs = specs[:2]
    sides = _each(rhs)
    transposed = arguments.get("rhs_transposed", False)
    columns = [_columns(side, transposed) for side in sides]
    if gather_axis == "n":
        columns = [_without(columns[0], axes, "rhs")]
        gathered = P(columns[0], _rows(sides[0], transposed))
        gathered = gathered if transposed else P(*gathered[::-1])
    else:
        given = arguments.get("axis")
        axis = _row_axis("all_gather_matmul", 0 if given is None else given, len(lhs))
        axis = len(lhs) - 1 if gather_axis == "k" else axis
        lhs = P(*(_without(x, axes, "lhs") if i == axis else x for i, x in enumerate(lhs)))
        gathered = lhs
    for name, entry in (("lhs", lhs[-1]), *(("rhs", _rows(x, transposed)) for x in sides)):
        if _names(entry):
            raise ValueError(
                f"all_gather_matmul: the contraction of {name} lies along {_names(entry)}, whose"
                " devices would each have an addend; a device must have all of it. Reshard it, or"
                " pass other in_specs."
            )
    outs = tuple(P(*lhs[:-1], x) for x in columns)
    several = not isinstance(rhs, P) and not epilogues.is_gated(arguments.get("epilogue"))
    out = outs if several else outs[0]
    return (out, gathered) if arguments.get("return_gathered") else out


def of_scatter(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """Of `matmul_reduce_scatter`: the rows are sharded over the team, too."""
    op = "matmul_reduce_scatter"
    *rows, columns = _of_sum(op, specs, axes, arguments)
    place = _row_axis(op, arguments.get("axis", 0), len(rows) + 1)
    rows[place] = (*_names(rows[place]), *axes)
    return P(*rows, columns)


def of_reduce(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """Of `matmul_all_reduce`: as the operands' rows and columns."""
    return _of_sum("matmul_all_reduce", specs, axes, arguments)


def _of_sum(op: str, specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """How the products of all pairs lie, whose contractions are sharded over the team.

    Raises:
      ValueError: one is not, and the sum over the devices would not be that of its addends; or the
        pairs' products lie differently.
    """
    transposed = arguments.get("rhs_transposed", False)
    sides = _each(specs[0]), _each(specs[1])
    checks.check_counts(op, *sides)
    pairs = list(zip(*sides, strict=True))
    for lhs, rhs in pairs:
        found = _names(lhs[-1]), _names(_rows(rhs, transposed))
        if found[0] != found[1] or set(found[0]) != set(axes):
            raise ValueError(
                f"{op}: the contraction lies along {found[0]} in lhs and {found[1]} in rhs, and the"
                f" products are summed over {axes}; it must lie along the axes of the sum in both."
                " Reshard it, or pass other in_specs or another axis_name."
            )
    first, *others = (P(*lhs[:-1], _columns(rhs, transposed)) for lhs, rhs in pairs)
    for other in others:
        if other != first:
            raise ValueError(
                f"{op}: the products of the pairs, which are added up, lie as {first} and {other};"
                " they must lie alike. Reshard the operands, or pass other in_specs."
            )
    return first


def _row_axis(op: str, axis: Any, dimensions: int) -> int:
    """`axis` of lhs, made non-negative; raises ValueError unless it is one of the rows."""
    axis = checks.check_integer(op, "axis", axis)
    place = axis + dimensions if axis < 0 else axis
    if not 0 <= place < dimensions - 1:
        raise ValueError(
            f"{op}: axis={axis} of lhs, which has {dimensions} dimensions, must be one before the"
            " contraction."
        )
    return place


def _each(specs: Any) -> tuple[P, ...]:
    """The specs of an operand that may be several matrices."""
    return (specs,) if isinstance(specs, P) else tuple(specs)


def _columns(rhs: P, transposed: bool) -> Any:
    return rhs[0 if transposed else 1]


def _rows(rhs: P, transposed: bool) -> Any:
    return rhs[1 if transposed else 0]


def _names(entry: Any) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _without(entry: Any, axes: Axes, name: str) -> Any:
    """The axes over which a dimension is still sharded once it is gathered over `axes`."""
    names = _names(entry)
    kept = len(names) - len(axes)
    if kept < 0 or names[kept:] != axes:
        raise ValueError(
            f"{name} lies along {names}, where it is gathered over {axes}; these must be the last"
            " axes of that dimension. Reshard it, or pass other in_specs."
        )
    return names[:kept] or None
