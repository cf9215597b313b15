"""Programs to time: many calls of one function inside a single `jit`, one after another.

A call waits for the one before through a token: the operands and the token pass an optimisation
barrier together, and the next token is the last one plus an element of the result. So XLA can
neither hoist a call out of the loop, nor drop it, nor start it early, and no operand is copied (an
update of an operand, the more obvious dependency, would copy it at each call). Calls rotate
through several sets of operands where one set would stay in the L2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.benchmarks.operations import AXIS, Block

L2_BYTES = 60e6
"""Larger than the L2 of an H100 (50 MB) and of an H200 (60 MB)."""
MAX_SETS = 8

ROWS = PartitionSpec(AXIS, None)
COLUMNS = PartitionSpec(None, AXIS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One function to time.

    `body` maps operands to one array. With `manual` it is called inside `shard_map`, on each
    device's blocks; without, on global arrays laid out as `specs` say, for XLA to partition.
    `compiler_options` are XLA's flags for this program only, `config` is what the result records.
    """

    body: Callable[..., jax.Array]
    blocks: tuple[Block, ...]
    specs: tuple[PartitionSpec, ...] = ()
    out_spec: PartitionSpec = ROWS
    manual: bool = True
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str = ""


def number_of_sets(footprint: int) -> int:
    """Sets of operands, each of `footprint` bytes with its results, to overflow the L2 twice."""
    return min(MAX_SETS, max(1, math.ceil(2 * L2_BYTES / footprint)))


class Operands:
    """Random operands of a case, made on the devices once and shared by every peer that asks.

    Args:
      mesh: one axis, `AXIS`.
      dtype: element type.
      seed: the values depend on it, on the block's shape, its place and its device only.
    """

    def __init__(self, mesh: Mesh, dtype: str, seed: int = 0):
        self._mesh = mesh
        self._dtype = jnp.dtype(dtype)
        self._seed = seed
        self._blocks: dict[tuple[Block, int], jax.Array] = {}

    def get(self, block: Block, place: int, spec: PartitionSpec = ROWS) -> jax.Array:
        """The array whose block on each device is `block`; `spec` says how the blocks join."""
        key = (block, place)
        if key not in self._blocks:
            self._blocks[key] = self._make(block, place)
        stacked = self._blocks[key]
        if spec == ROWS:
            return stacked
        whole = (block[0], block[1] * self._mesh.size)
        shards = [shard.data for shard in stacked.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            whole, NamedSharding(self._mesh, spec), shards
        )

    def sets(self, candidate: Candidate, count: int) -> list[tuple[jax.Array, ...]]:
        """`count` different sets of `candidate`'s operands."""
        specs = candidate.specs or (ROWS,) * len(candidate.blocks)
        width = len(candidate.blocks)
        return [
            tuple(
                self.get(block, index * width + position, spec)
                for position, (block, spec) in enumerate(zip(candidate.blocks, specs, strict=True))
            )
            for index in range(count)
        ]

    def _make(self, block: Block, place: int) -> jax.Array:
        def fill() -> jax.Array:
            key = jax.random.key(self._seed)
            for part in (place, block[0], block[1], lax.axis_index(AXIS)):
                key = jax.random.fold_in(key, part)
            if jnp.issubdtype(self._dtype, jnp.floating):
                return jax.random.normal(key, block, jnp.float32).astype(self._dtype)
            return jax.random.randint(key, block, -100, 100).astype(self._dtype)

        return jax.jit(
            jax.shard_map(fill, mesh=self._mesh, in_specs=(), out_specs=ROWS, check_vma=False)
        )()


def first_token(mesh: Mesh) -> jax.Array:
    """The token that the first call takes: one float32 a device."""
    sharding = NamedSharding(mesh, ROWS)
    return jax.make_array_from_callback(
        (mesh.size, 1), sharding, lambda index: np.zeros((1, 1), np.float32)
    )


def looped(
    candidate: Candidate, mesh: Mesh, num_sets: int, rounds: int
) -> Callable[..., jax.Array]:
    """A function of (token, set 0's operands, set 1's, ...) that calls the candidate in a loop.

    Each of the `rounds` calls the body once per set. Returns the next token. Not yet jitted.
    """
    width = len(candidate.blocks)

    def loop(token: jax.Array, *flat: jax.Array) -> jax.Array:
        sets = [flat[start : start + width] for start in range(0, num_sets * width, width)]

        def step(_: jax.Array, token: jax.Array) -> jax.Array:
            for operands in sets:
                operands, token = lax.optimization_barrier((operands, token))
                token = token + element(lax.optimization_barrier(candidate.body(*operands)))
            return token

        return lax.fori_loop(0, rounds, step, token)

    def element(out: jax.Array) -> jax.Array:
        if candidate.manual:
            return _corner(out)
        # Each device's own corner, so that no collective is added.
        return jax.shard_map(_corner, mesh=mesh, in_specs=candidate.out_spec, out_specs=ROWS)(out)

    if not candidate.manual:
        return loop
    return jax.shard_map(loop, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)


def _corner(out: jax.Array) -> jax.Array:
    return lax.slice(out, (0, 0), (1, 1)).astype(jnp.float32)


def lowered(
    candidate: Candidate, mesh: Mesh, sets: Sequence[tuple[jax.Array, ...]], rounds: int
) -> Any:
    """`looped`, traced and lowered for these operands; `compiled` does the rest."""
    flat = [operand for operands in sets for operand in operands]
    return jax.jit(looped(candidate, mesh, len(sets), rounds)).lower(first_token(mesh), *flat)


def compiled(candidate: Candidate, program: Any) -> Callable[..., jax.Array]:
    """A lowered program, compiled with the candidate's compiler options."""
    return program.compile(compiler_options=dict(candidate.compiler_options) or None)


def run_once(candidate: Candidate, mesh: Mesh, operands: tuple[jax.Array, ...]) -> jax.Array:
    """One call's result, as a global array whose blocks are the devices' results."""
    if candidate.manual:
        body = jax.shard_map(
            candidate.body, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
        )
    else:
        body = candidate.body
    return compiled(candidate, jax.jit(body).lower(*operands))(*operands)


def relative_error(ours: jax.Array, theirs: jax.Array, mesh: Mesh) -> float:
    """Largest over devices of `|ours - theirs| / |theirs|` (Frobenius), NaN counted as infinite."""

    def block_error(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        scale = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(jnp.float32).tiny)
        error = jnp.linalg.norm(a - b) / scale
        return lax.pmax(jnp.where(jnp.isnan(error), jnp.inf, error), AXIS)

    error = jax.jit(
        jax.shard_map(
            block_error, mesh=mesh, in_specs=ROWS, out_specs=PartitionSpec(), check_vma=False
        )
    )(ours, theirs)
    return float(error.addressable_data(0))
