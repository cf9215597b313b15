"""Programs to time: many calls of one function inside a single `jit`, one after another.

A call waits for the one before through a token: the operands and the token pass an optimisation
barrier together, and the next token is the last one plus an element of the result. So XLA can
neither hoist a call out of the loop, nor drop it, nor start it early, and no operand is copied (an
update of an operand, the more obvious dependency, would copy it at each call). Calls rotate
through several sets of operands where one set would stay in the L2.

One more call, on the first set, follows the loop, and its result is returned: the program that is
timed is the one whose result is checked, and no other needs to be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.meshes import joined

L2_BYTES = 60e6
"""Larger than the L2 of an H100 (50 MB) and of an H200 (60 MB)."""
MAX_SETS = 8


def number_of_sets(footprint: int) -> int:
    """Sets of operands, each of `footprint` bytes with its results, to overflow the L2 twice.

    Two where not even `MAX_SETS` would overflow it once: so small a problem is always in the L2.
    """
    if footprint * MAX_SETS < L2_BYTES:
        return 2
    return min(MAX_SETS, math.ceil(2 * L2_BYTES / footprint))


def first_token(mesh: Mesh) -> jax.Array:
    """The token that the first call takes: one float32 a device."""
    sharding = NamedSharding(mesh, joined(mesh))
    return jax.make_array_from_callback(
        (mesh.size, 1), sharding, lambda index: np.zeros((1, 1), np.float32)
    )


def looped(
    candidate: Candidate, mesh: Mesh, num_sets: int, rounds: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A function of (token, set 0's operands, set 1's, ...) that calls the candidate in a loop.

    Each of the `rounds` calls the body once per set, and a last call follows on set 0. Returns the
    next token and the last call's result. Not yet jitted.
    """
    width, rows = len(candidate.operands), joined(mesh)

    # One function for all calls, so that it is traced and lowered once and not for each set.
    @jax.jit
    def operation(*operands: jax.Array) -> Any:
        return _as_arrays(candidate.body(*operands))

    def call(token: jax.Array, operands: Any) -> tuple[jax.Array, Any]:
        operands, token = lax.optimization_barrier((operands, token))
        out = lax.optimization_barrier(operation(*operands))
        return token + element(out), out

    def loop(token: jax.Array, *flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        sets = [flat[start : start + width] for start in range(0, num_sets * width, width)]

        def step(_: jax.Array, token: jax.Array) -> jax.Array:
            for operands in sets:
                token, _out = call(token, operands)
            return token

        return call(lax.fori_loop(0, rounds, step, token), sets[0])

    def element(out: Any) -> jax.Array:
        if candidate.manual:
            return _corners(out)
        # Each device's own corner, so that no collective is added.
        out_spec = joined(mesh, candidate.out_joins)
        return jax.shard_map(_corners, mesh=mesh, in_specs=out_spec, out_specs=rows)(out)

    if not candidate.manual:
        return loop
    return jax.shard_map(loop, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)


def _as_arrays(out: Any) -> Any:
    """Results with a dimension at least, along which those of devices can be joined."""
    return jax.tree.map(lambda x: x.reshape(1) if x.ndim == 0 else x, out)


def _corners(out: Any) -> jax.Array:
    """The sum of the results' first elements, `[1, 1]`, so that none of them may be left out."""
    first, *others = map(_corner, jax.tree.leaves(out))
    return sum(others, first)


def _corner(out: jax.Array) -> jax.Array:
    """The first element, `[1, 1]`, of an array with any number of dimensions."""
    first = lax.slice(out, (0,) * out.ndim, (1,) * out.ndim)
    return first.reshape(1, 1).astype(jnp.float32)


def traced(
    candidate: Candidate,
    mesh: Mesh,
    operands: list[jax.ShapeDtypeStruct],
    num_sets: int,
    rounds: int,
) -> Any:
    """`looped`, traced for `num_sets` sets of such operands: to be lowered and compiled."""
    sharding = NamedSharding(mesh, joined(mesh))
    token = jax.ShapeDtypeStruct((mesh.size, 1), jnp.float32, sharding=sharding)
    loop = looped(candidate, mesh, num_sets, rounds)
    return jax.jit(loop).trace(token, *operands * num_sets)


def run_once(candidate: Candidate, mesh: Mesh, operands: tuple[jax.Array, ...]) -> jax.Array:
    """One call's result, the first if it has several, as a global array: the devices' joined."""

    def body(*operands: jax.Array) -> jax.Array:
        return jax.tree.leaves(candidate.body(*operands))[0]

    if candidate.manual:
        rows = joined(mesh)
        body = jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(body)(*operands)


def error_program(mesh: Mesh, out: Any, defined: Callable[[Any], Any] = lambda out: out) -> Any:
    """Lowered: (ours, theirs) -> the largest over devices of `|ours - theirs| / |theirs|`.

    In the Frobenius norm, NaN counted as infinite. Both are as `out` says: an array, or a tree of
    some, of which the largest error counts. `defined` sets to zero what a device's results leave
    undefined.
    """

    def largest(ours: Any, theirs: Any) -> jax.Array:
        errors = jax.tree.leaves(jax.tree.map(error_of_one, defined(ours), defined(theirs)))
        return jnp.max(jnp.stack(errors))

    def error_of_one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        scale = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(jnp.float32).tiny)
        error = jnp.linalg.norm(a - b) / scale
        return lax.pmax(jnp.where(jnp.isnan(error), jnp.inf, error), mesh.axis_names)

    error = jax.shard_map(
        largest, mesh=mesh, in_specs=joined(mesh), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(error).lower(out, out)
