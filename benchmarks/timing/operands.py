"""Random operands, made on the devices once and shared by all peers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.meshes import joined
from stretto.benchmarks.timing.compiling import Compiler
from stretto.kernels.operation import Operand


class Operands:
    """The operands of a case.

    `prepare` compiles what makes them and allocates nothing; `get` allocates.

    Args:
      mesh: what they lie on.
      dtype: type of the elements of operands without a type of their own.
      compiler: compiles the programs that fill them.
      seed: the values depend on it, on the operand, its place and its device only.
    """

    def __init__(self, mesh: Mesh, dtype: str, compiler: Compiler, seed: int = 0):
        self._mesh = mesh
        self._dtype = dtype
        self._compiler = compiler
        self._seed = seed
        self._fills: dict[Operand, Future[Any]] = {}
        self._made: dict[tuple[Operand, int], jax.Array] = {}

    def prepare(self, candidate: Candidate) -> None:
        """Begins to compile what fills the candidate's operands."""
        for operand in candidate.operands:
            self._filler(operand)

    def describe(self, candidate: Candidate) -> list[jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of one set of the candidate's operands."""
        return [
            jax.ShapeDtypeStruct(
                self._whole(operand, dimension),
                self._type_of(operand),
                sharding=NamedSharding(self._mesh, joined(self._mesh, dimension)),
            )
            for operand, dimension in zip(candidate.operands, candidate.dimensions, strict=True)
        ]

    def get(self, operand: Operand, place: int, dimension: int = 0) -> jax.Array:
        """The global array of an operand, the devices' arrays joined along `dimension`."""
        key = (operand, place)
        if key not in self._made:
            self._made[key] = self._filler(operand).result()(np.int32(place))
        stacked = self._made[key]
        if dimension == 0:
            return stacked
        return jax.make_array_from_single_device_arrays(
            self._whole(operand, dimension),
            NamedSharding(self._mesh, joined(self._mesh, dimension)),
            [shard.data for shard in stacked.addressable_shards],
        )

    def sets(self, candidate: Candidate, count: int) -> list[tuple[jax.Array, ...]]:
        """`count` different sets of `candidate`'s operands."""
        width = len(candidate.operands)
        pairs = list(zip(candidate.operands, candidate.dimensions, strict=True))
        return [
            tuple(self.get(one, index * width + i, dim) for i, (one, dim) in enumerate(pairs))
            for index in range(count)
        ]

    def _type_of(self, operand: Operand) -> jnp.dtype:
        return jnp.dtype(operand.dtype or self._dtype)

    def _whole(self, operand: Operand, dimension: int) -> tuple[int, ...]:
        """The shape of the global array."""
        shape = list(operand.shape)
        shape[dimension] *= self._mesh.size
        return tuple(shape)

    def _filler(self, operand: Operand) -> Future[Any]:
        if operand not in self._fills:
            lowered = self._fill(operand).lower(jax.ShapeDtypeStruct((), jnp.int32))
            self._fills[operand] = self._compiler.submit(lowered)
        return self._fills[operand]

    def _fill(self, operand: Operand) -> Any:
        """(place) -> the global array, every device's drawn by itself."""

        def fill(place: jax.Array) -> jax.Array:
            key = jax.random.key(self._seed)
            for word in (place, *operand.shape, lax.axis_index(self._mesh.axis_names)):
                key = jax.random.fold_in(key, word)
            return drawn(operand, key, self._type_of(operand))

        return jax.jit(
            jax.shard_map(
                fill,
                mesh=self._mesh,
                in_specs=PartitionSpec(),
                out_specs=joined(self._mesh),
                check_vma=False,
            )
        )


def drawn(operand: Operand, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values of one device's operand, in `dtype`."""
    if operand.draw is not None:
        return operand.draw(key).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(key, operand.shape, jnp.float32).astype(dtype)
    return jax.random.randint(key, operand.shape, -100, 100).astype(dtype)
