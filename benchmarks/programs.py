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

import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.benchmarks.compiling import Compiler
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

    @property
    def all_specs(self) -> tuple[PartitionSpec, ...]:
        """How the blocks of every operand join."""
        return self.specs or (ROWS,) * len(self.blocks)


def number_of_sets(footprint: int) -> int:
    """Sets of operands, each of `footprint` bytes with its results, to overflow the L2 twice.

    Two where not even `MAX_SETS` would overflow it once: so small a problem is always in the L2.
    """
    if footprint * MAX_SETS < L2_BYTES:
        return 2
    return min(MAX_SETS, math.ceil(2 * L2_BYTES / footprint))


class Operands:
    """Random operands of a case, made on the devices once and shared by every peer that asks.

    `prepare` compiles what makes them and allocates nothing; `get` allocates.

    Args:
      mesh: one axis, `AXIS`.
      dtype: element type.
      compiler: compiles the programs that fill them.
      seed: the values depend on it, on the block's shape, its place and its device only.
    """

    def __init__(self, mesh: Mesh, dtype: str, compiler: Compiler, seed: int = 0):
        self._mesh = mesh
        self._dtype = jnp.dtype(dtype)
        self._compiler = compiler
        self._seed = seed
        self._fills: dict[Block, Future[Any]] = {}
        self._blocks: dict[tuple[Block, int], jax.Array] = {}

    def prepare(self, candidate: Candidate) -> None:
        """Begins to compile what fills the candidate's operands."""
        for block in candidate.blocks:
            self._filler(block)

    def describe(self, candidate: Candidate) -> list[jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of one set of the candidate's operands."""
        return [
            jax.ShapeDtypeStruct(
                self._whole(block, spec), self._dtype, sharding=NamedSharding(self._mesh, spec)
            )
            for block, spec in zip(candidate.blocks, candidate.all_specs, strict=True)
        ]

    def get(self, block: Block, place: int, spec: PartitionSpec = ROWS) -> jax.Array:
        """The array whose block on each device is `block`; `spec` says how the blocks join."""
        key = (block, place)
        if key not in self._blocks:
            self._blocks[key] = self._filler(block).result()(np.int32(place))
        stacked = self._blocks[key]
        if spec == ROWS:
            return stacked
        shards = [shard.data for shard in stacked.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            self._whole(block, spec), NamedSharding(self._mesh, spec), shards
        )

    def sets(self, candidate: Candidate, count: int) -> list[tuple[jax.Array, ...]]:
        """`count` different sets of `candidate`'s operands."""
        width = len(candidate.blocks)
        pairs = list(zip(candidate.blocks, candidate.all_specs, strict=True))
        return [
            tuple(self.get(block, index * width + i, spec) for i, (block, spec) in enumerate(pairs))
            for index in range(count)
        ]

    def _filler(self, block: Block) -> Future[Any]:
        if block not in self._fills:
            lowered = self._fill(block).lower(jax.ShapeDtypeStruct((), jnp.int32))
            self._fills[block] = self._compiler.submit(lowered)
        return self._fills[block]

    def _whole(self, block: Block, spec: PartitionSpec) -> tuple[int, int]:
        rows, columns = block
        size = self._mesh.size
        return (rows * size, columns) if spec == ROWS else (rows, columns * size)

    def _fill(self, block: Block) -> Any:
        def fill(place: jax.Array) -> jax.Array:
            key = jax.random.key(self._seed)
            for part in (place, block[0], block[1], lax.axis_index(AXIS)):
                key = jax.random.fold_in(key, part)
            if jnp.issubdtype(self._dtype, jnp.floating):
                return jax.random.normal(key, block, jnp.float32).astype(self._dtype)
            return jax.random.randint(key, block, -100, 100).astype(self._dtype)

        return jax.jit(
            jax.shard_map(
                fill, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=ROWS, check_vma=False
            )
        )


def first_token(mesh: Mesh) -> jax.Array:
    """The token that the first call takes: one float32 a device."""
    sharding = NamedSharding(mesh, ROWS)
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
    width = len(candidate.blocks)

    # One function for all calls, so that it is traced and lowered once and not for each set.
    @jax.jit
    def operation(*operands: jax.Array) -> jax.Array:
        return candidate.body(*operands)

    def call(token: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
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


def traced(
    candidate: Candidate,
    mesh: Mesh,
    operands: list[jax.ShapeDtypeStruct],
    num_sets: int,
    rounds: int,
) -> Any:
    """`looped`, traced for `num_sets` sets of such operands: to be lowered and compiled."""
    token = jax.ShapeDtypeStruct((mesh.size, 1), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    loop = looped(candidate, mesh, num_sets, rounds)
    return jax.jit(loop).trace(token, *operands * num_sets)


def run_once(candidate: Candidate, mesh: Mesh, operands: tuple[jax.Array, ...]) -> jax.Array:
    """One call's result, as a global array whose blocks are the devices' results."""
    body = candidate.body
    if candidate.manual:
        body = jax.shard_map(body, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    return jax.jit(body)(*operands)


def error_program(mesh: Mesh, out: jax.ShapeDtypeStruct) -> Any:
    """Lowered: (ours, theirs) -> the largest over devices of `|ours - theirs| / |theirs|`.

    In the Frobenius norm, NaN counted as infinite. Both are as `out` says, a block a device.
    """

    def block_error(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        scale = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(jnp.float32).tiny)
        error = jnp.linalg.norm(a - b) / scale
        return lax.pmax(jnp.where(jnp.isnan(error), jnp.inf, error), AXIS)

    error = jax.shard_map(
        block_error, mesh=mesh, in_specs=ROWS, out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(error).lower(out, out)
