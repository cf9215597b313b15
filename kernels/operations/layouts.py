"""The sharding of the matmuls' results, from that of their operands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

type Axes = tuple[Hashable, ...]
type Arguments = Mapping[str, Any]


def of_gather(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> Any:
    """Of `all_gather_matmul`: the gathered dimension is no longer sharded over the team."""
    gather_axis = arguments.get("gather_axis", "m")
    lhs, rhs = specs
    sides = rhs if isinstance(rhs, tuple) and not isinstance(rhs, P) else (rhs,)
    transposed = arguments.get("rhs_transposed", False)
    columns = [_columns(side, transposed) for side in sides]
    if gather_axis == "n":
        columns = [_without(columns[0], axes, "rhs")]
        gathered = P(columns[0], _rows(sides[0], transposed))
        gathered = gathered if transposed else P(*gathered[::-1])
    else:
        axis = len(lhs) - 1 if gather_axis == "k" else arguments.get("axis") or 0
        axis %= len(lhs)
        lhs = P(*(_without(x, axes, "lhs") if i == axis else x for i, x in enumerate(lhs)))
        gathered = lhs
    outs = tuple(P(*lhs[:-1], x) for x in columns)
    out = outs if isinstance(rhs, tuple) and not isinstance(rhs, P) else outs[0]
    return (out, gathered) if arguments.get("return_gathered") else out


def of_scatter(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """Of `matmul_reduce_scatter`: the rows are sharded over the team, too."""
    rows = list(_first(specs[0])[:-1])
    axis = arguments.get("axis", 0) % (len(rows) + 1)
    rows[axis] = (*_names(rows[axis]), *axes)
    return P(*rows, _columns(_first(specs[1]), arguments.get("rhs_transposed", False)))


def of_reduce(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """Of `matmul_all_reduce`: as the operands' rows and columns."""
    del axes
    transposed = arguments.get("rhs_transposed", False)
    return P(*_first(specs[0])[:-1], _columns(_first(specs[1]), transposed))


def _first(spec: Any) -> P:
    """The spec of an operand, or of the first of several, whose products are added up."""
    return spec if isinstance(spec, P) else spec[0]


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
