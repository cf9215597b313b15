"""The operations on experts on whole arrays: the sharding of results, and their sums over axes.

On whole arrays there is more than one team: further axes may split the tokens (data parallelism) or
the experts' `f` (tensor parallelism). Each team counts its own tokens, and each device computes an
addend of a token; both are summed over the further axes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

from stretto.kernels.problem.routing import Routing

type Axes = tuple[Hashable, ...]
type Arguments = Mapping[str, Any]


def of_dispatch(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> tuple[P, Routing]:
    """The rows' axes are those of the tokens: each team's devices one after the other."""
    del arguments
    x, index = specs[:2]
    _check_tokens("expert_dispatch", {"x": x, "expert_index": index}, axes)
    return P(x[0], x[1]), _routing(index)


def of_combine(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> P:
    """The specs of tokens, from those of their tables."""
    del arguments
    rows, weights, positions = specs[:3]
    _check_tokens(
        "expert_combine", {"rows": rows, "weights": weights, "positions": positions}, axes
    )
    return P(positions[0], rows[1])


def of_layer(specs: Sequence[Any], axes: Axes, arguments: Arguments) -> tuple[P, Routing]:
    """The specs of tokens, unchanged."""
    x, index, weights, w_in, w_out = specs[:5]
    _check_tokens("mixture_of_experts", {"x": x, "expert_index": index, "weights": weights}, axes)
    sides = (w_in,) if isinstance(w_in, P) else tuple(w_in)
    for name, spec in (*(("w_in", side) for side in sides), ("w_out", w_out)):
        if _names(spec[0]) != axes:
            raise ValueError(
                f"mixture_of_experts: the experts of {name} lie along {_names(spec[0])}; they must"
                f" lie along {axes}, as axis_name has it. Reshard them, or pass other in_specs."
            )
    if wrong := [side for side in sides if _names(side[2]) != _names(w_out[1])]:
        raise ValueError(
            f"mixture_of_experts: the columns of w_in lie along {_names(wrong[0][2])} and the rows"
            f" of w_out along {_names(w_out[1])}; the experts' f must lie alike. Reshard one,"
            " or pass other in_specs."
        )
    if _names(w_out[1]) and arguments.get("b_out") is not None:
        raise NotImplementedError(
            f"mixture_of_experts: w_out's f lies along {_names(w_out[1])}, whose devices would each"
            " add b_out. Call it inside jax.shard_map, with a b_out of zero on all but one of them."
        )
    return P(x[0], None), _routing(index)


def whole_counts(results: Any, operands: Any, specs: Sequence[Any], axes: Axes) -> Any:
    """The results of a dispatch, with counts of all tokens."""
    del operands
    rows, routing = results
    return rows, _over_all_tokens(routing, specs[1], axes)


def whole_layer(results: Any, operands: Any, specs: Sequence[Any], axes: Axes) -> Any:
    """The results of a layer: with all of the experts' `f`, and counts of all tokens.

    Raises:
      ValueError: gate and up lie in one matrix whose columns are split.
    """
    out, routing = results
    _, _, _, w_in, w_out = operands[:5]
    split = _names(specs[4][1])
    in_one = not isinstance(w_in, tuple | list) and w_in.shape[2] != w_out.shape[1]
    if split and in_one:
        raise ValueError(
            f"mixture_of_experts: the columns of w_in lie along {split}, and gate and up lie in one"
            " matrix: a device would have columns of one of them only. Pass w_in=(gate, up)."
        )
    return (lax.psum(out, split) if split else out), _over_all_tokens(routing, specs[1], axes)


def _over_all_tokens(routing: Routing, index: P, axes: Axes) -> Routing:
    others = tuple(name for name in _names(index[0]) if name not in axes)
    if not others:
        return routing
    counts = routing.tokens_per_expert, routing.dropped, routing.out_of_range
    tokens, dropped, strays = (lax.psum(count, others) for count in counts)
    return routing._replace(tokens_per_expert=tokens, dropped=dropped, out_of_range=strays)


def _routing(index: P) -> Any:
    """The specs of the tables."""
    once: Any = P()
    positions: Any = P(index[0], None)
    sizes: Any = P(index[0])
    return Routing(positions, sizes, once, once, once)


def _check_tokens(op: str, specs: Mapping[str, P], axes: Axes) -> None:
    """Raises ValueError unless all of a token's operands lie along the team, in the same way."""
    first, *_ = specs.values()
    for name, spec in specs.items():
        along = _names(spec[0])
        if not set(axes) <= set(along):
            raise ValueError(
                f"{op}: the rows of {name} lie along {along}; they must lie along {axes}, as"
                " axis_name has it, and perhaps others. Reshard it, or pass other in_specs."
            )
        if along != _names(first[0]):
            raise ValueError(
                f"{op}: the rows of {name} lie along {along} and those of the first operand along"
                f" {_names(first[0])}; they must lie alike."
            )
    if op == "mixture_of_experts" and first[1] is not None:
        raise ValueError(
            f"{op}: the columns of x lie along {_names(first[1])}; a device must have all of them."
        )


def _names(entry: Any) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
