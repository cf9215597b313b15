"""Pipelines over the nodes of a team: one piece crosses while a kernel works on the one before.

Each takes the kernel as a function. Operations overlap because of their order, kept by barriers
between values: XLA's scheduler starts a collective as early as its operand allows, and waits for it
as late as its result is needed. Collectives go one after another, like kernels: XLA would make one
of those that do not wait for each other, which begins with the last piece and ends before the first
is used.

"Values" are arrays or tuples of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed import residency
from stretto.kernels.nodes.nodes import Nodes
from stretto.kernels.xla.matmul import accumulator_dtype

type Work = Callable[[Any], Any]
type Pieces = Sequence[tuple[int, int]]


def _one_after_another(work: Work, operands: Sequence[Any]) -> list[Any]:
    """`work` of each operand, each begun once the one before is done.

    XLA keeps an order only between values that are used behind a barrier: a result is the output
    of the barrier before the next call. The first operand has one too, which prevents XLA from
    passing a kernel a slice of another array in place of an array of its own.
    """
    results: list[Any] = []
    for operand in operands:
        operand, *results[-1:] = lax.optimization_barrier((operand, *results[-1:]))
        results.append(work(operand))
    return results


def gather(
    team: Nodes, rows: jax.Array, pieces: Pieces, work: Work
) -> list[tuple[jax.Array, int, Any]]:
    """Works on the own node's rows, then on every other node's, piece by piece as they arrive.

    Returns:
      For each piece: its node, its first row there, and the values that `work`
      returned for it.
    """
    places = [(shift, first, end) for shift in team.shifts for first, end in pieces]
    here, results = rows, []
    with residency.beside_collectives():
        for shift, first, end in places:
            # What crosses next may start once the kernel before is done, and so beside this one.
            crossing, here, *results[-1:] = lax.optimization_barrier(
                (rows[first:end], here, *results[-1:])
            )
            results.append(work(here))
            here = team.move(crossing, shift)
        here, results[-1] = lax.optimization_barrier((here, results[-1]))
        results.append(work(here))
    own = (0, 0, len(rows))
    return [
        (team.node_id(-shift), first, result)
        for (shift, first, _), result in zip([own, *places], results, strict=True)
    ]


def scatter(team: Nodes, shards: Any, pieces: Pieces, work: Work) -> jax.Array:
    """Sums over all devices the rows that each one owns.

    A node's sum has the type that `work` gives it; the nodes' are added in float32.

    Args:
      team: whose devices own shards.
      shards: values `[nodes, devices, rows, ...]`, what this device adds to every device's rows.
      pieces: of the rows.
      work: sums values `[devices * r, ...]` over the devices of a node -> `[r, ...]`, this
        device's.
    """

    def rows_for(shift: int, first: int, end: int) -> Any:
        """What this device adds to rows of the node `shift` places further."""

        def take(x: jax.Array) -> jax.Array:
            theirs = lax.dynamic_index_in_dim(x, team.node_id(shift), 0, keepdims=False)
            return theirs[:, first:end].reshape(-1, *x.shape[3:])

        return jax.tree.map(take, shards)

    places = [(shift, first, end) for shift in team.shifts for first, end in pieces]
    own_rows = rows_for(0, 0, pieces[-1][1])
    with residency.beside_collectives():
        *sums, own = _one_after_another(work, [*(rows_for(*place) for place in places), own_rows])
        shifts = iter([shift for shift, _, _ in places])
        moved = _one_after_another(lambda part: team.move(part, next(shifts)), sums)
    total = own.astype(accumulator_dtype(own.dtype))
    for first in range(0, len(moved), len(pieces)):
        total += jnp.concatenate(moved[first : first + len(pieces)]).astype(total.dtype)
    return total.astype(own.dtype)


def reduce(team: Nodes, rows: Any, pieces: Pieces, scatter: Work, gather: Work) -> jax.Array:
    """Sums rows over all devices, for all of them; XLA adds the nodes' sums, in their type.

    Args:
      team: whose devices hold `rows`.
      rows: values `[n, ...]`.
      pieces: of the rows.
      scatter: values `[r, ...]` -> `[ceil(r / devices), ...]`, this device's part of its node's
        sum.
      gather: `[p, ...]` -> `[devices * p, ...]`, the parts of all devices of a node.
    """
    with residency.beside_collectives():
        cut = [jax.tree.map(lambda x, piece=p: x[slice(*piece)], rows) for p in pieces]
        parts = _one_after_another(scatter, cut)
        sums = _one_after_another(lambda part: lax.psum(part, team.outer), parts)
        wholes = _one_after_another(gather, sums)
    wholes = [whole[: end - first] for (first, end), whole in zip(pieces, wholes, strict=True)]
    return wholes[0] if len(wholes) == 1 else jnp.concatenate(wholes)
