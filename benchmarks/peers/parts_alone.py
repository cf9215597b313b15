"""The parts of an operation alone, on which its floor rests: its matmul, its communication."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case, call_of
from stretto.benchmarks.cases.meshes import architecture_of
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.engine.architectures import TILES
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operation import Operand
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.scales import FP8


def _factors(case: Case) -> tuple[Operand, Operand]:
    """The operands of the matmul inside: on one device, with what was gathered."""
    if case.work.product is None:
        raise UnavailableError("there is no matmul in it")
    m, k, n = case.work.product
    groups = case.work.matrices
    rows = (groups, -(-m // groups)) if groups > 1 else (m,)
    of_groups = (groups,) if groups > 1 else ()
    if case.operation.examples.scales is not None:
        lhs = Operand(shape=(*rows, k), dtype=FP8[0])
        return lhs, Operand(shape=(*of_groups, n, k), dtype=FP8[0])
    return Operand(shape=(*rows, k)), Operand(shape=(*of_groups, k, n))


def matmul(case: Case, mesh: Mesh) -> list[Candidate]:
    """One product; of rows for several matrices a product of each, of as many rows."""
    if case.operation.examples.scales is not None:
        return [Candidate(body=_product_in_8_bits, operands=_factors(case))]

    def body(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32).astype(lhs.dtype)

    return [Candidate(body=body, operands=_factors(case))]


def _product_in_8_bits(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """cuBLAS's, with fast accumulation and one scale of 1; rhs is transposed.

    Of a product in float32 XLA would round cuBLAS's result in a pass of its own.
    """
    *batch, _, k = range(lhs.ndim)
    return lax.dot_general(
        lhs, rhs, (((k,), (k,)), (batch, batch)), preferred_element_type=jnp.bfloat16
    )


def own_matmul(case: Case, mesh: Mesh) -> list[Candidate]:
    """Stretto's main loop as a kernel of one device, in several of its tiles."""
    tiles = TILES.get(architecture_of(mesh))
    if tiles is None:
        raise UnavailableError("it needs GPUs of compute capability 9.0 or 10.0")
    if case.operation.examples.scales is not None:
        raise UnavailableError("it is timed without scales")
    factors = _factors(case)
    if case.work.matrices > 1:
        raise UnavailableError("it has one matrix for all rows")
    return [
        Candidate(
            body=functools.partial(local_matmul, config=config),
            operands=factors,
            config=str(config),
        )
        for config in (
            dataclasses.replace(tiles.large, raster_width=8),
            dataclasses.replace(tiles.large, raster_width=16),
            *tiles.large_ones[1:],
            tiles.narrow,
        )
    ]


def communication(case: Case, mesh: Mesh) -> list[Candidate]:
    """The collective inside, by NCCL."""
    traffic = case.work.traffic
    if traffic is None or case.devices == 1:
        raise UnavailableError("one device sends nothing")
    body = call_of(OPERATIONS[traffic.collective], "xla", axes=mesh.axis_names)
    return [Candidate(body=body, operands=(Operand(shape=traffic.shape),))]
