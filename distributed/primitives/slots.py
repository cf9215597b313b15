"""This device's slot in the heap, and those of its team, in a kernel that XLA takes for no collective.

A kernel that asks Mosaic GPU for its place among devices is a collective to XLA, which runs a barrier
before it, hands it a table of addresses, and must not record it. Here the program passes the place to
the kernel as an operand, and the rest is arithmetic on numbers that are known when it is lowered.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive
from jax.interpreters import mlir

from stretto.distributed.private_jax.dialects import arith, hlo, ir
from stretto.distributed.private_jax.kernel_rules import (
    BY_WARPGROUP,
    int32_result,
    int32_value,
    lowers,
)

# --- Outside of kernels ---------------------------------------------------------------------------

place_p = Primitive("stretto_place")


def place() -> jax.Array:
    """This device's number in the mesh, uint32 `[1]`: an operand for `slot_of_place`.

    XLA makes it by setting one word of memory, once for all kernels of a program outside of loops.
    """
    return place_p.bind()


@place_p.def_abstract_eval
def _place_abstract_eval():
    return ShapedArray((1,), jnp.uint32)


def _place_lowering(ctx):
    (out,) = ctx.avals_out
    return [hlo.reshape(mlir.aval_to_ir_type(ctx.module_context, out), hlo.partition_id())]


mlir.register_lowering(place_p, _place_lowering)

# --- In a kernel ----------------------------------------------------------------------------------

_members: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("members", default=())


@contextlib.contextmanager
def of_members(places: Sequence[int]) -> Generator[None]:
    """Kernels are lowered inside it whose slots are those of the devices at `places`, in order."""
    token = _members.set(tuple(places))
    try:
        yield
    finally:
        _members.reset(token)


def as_int32(x: int | jax.Array) -> jax.Array:
    """An operand of the primitives here."""
    return jnp.asarray(x, dtype=jnp.int32)


def _constant(value: int) -> ir.Value:
    return mgpu_utils.c(value, ir.IntegerType.get_signless(32))


slot_of_place_p = Primitive("stretto_slot_of_place")


def slot_of_place(number: jax.Array) -> jax.Array:
    """The slot of the device whose `place` is `number`; for its own device only."""
    return slot_of_place_p.bind(as_int32(number))


@slot_of_place_p.def_abstract_eval
def _slot_of_place_abstract_eval(number):
    del number
    return ShapedArray((), jnp.int32)


@lowers(slot_of_place_p, BY_WARPGROUP)
def _slot_of_place_lowering(ctx, number):
    del ctx
    number, places = int32_value(number), _members.get()
    if places == tuple(range(len(places))):
        return int32_result(number)
    found = _constant(0)
    for slot, place_of_slot in enumerate(places):
        same = arith.cmpi(arith.CmpIPredicate.eq, number, _constant(place_of_slot))
        found = arith.select(same, _constant(slot), found)
    return int32_result(found)


member_p = Primitive("stretto_member")


def member(slot: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """Which member of its team along `axes` the device of `slot` is."""
    return member_p.bind(as_int32(slot), axes=axes)


@member_p.def_effectful_abstract_eval
def _member_abstract_eval(slot, *, axes):
    del slot, axes
    return ShapedArray((), jnp.int32), set()


slot_of_member_p = Primitive("stretto_slot_of_member")


def slot_of_member(slot: jax.Array, which: int | jax.Array, axes: tuple[Hashable, ...]) -> Any:
    """The slot of member `which` of the team along `axes` of the device of `slot`."""
    return slot_of_member_p.bind(as_int32(slot), as_int32(which), axes=axes)


@slot_of_member_p.def_effectful_abstract_eval
def _slot_of_member_abstract_eval(slot, which, *, axes):
    del slot, which, axes
    return ShapedArray((), jnp.int32), set()


type Steps = list[tuple[int, int, int]]


def steps(names: Sequence[Hashable], sizes: Sequence[int], axes: Sequence[Hashable]) -> Steps:
    """(size, distance of neighbours in slots, of neighbours in members) of each axis of a team.

    `names` and `sizes` are the axes of the box of the mesh whose devices have slots, row-major.
    """
    found, inner = [], 1
    for axis in reversed(axes):
        at = list(names).index(axis)
        found.append((sizes[at], math.prod(sizes[at + 1 :]), inner))
        inner *= sizes[at]
    return found


def member_of(slot: Any, team: Steps) -> Any:
    """`member` as arithmetic, on numbers or arrays."""
    return sum((slot // distance % size * inner for size, distance, inner in team), start=0)


def slot_of(slot: Any, which: Any, team: Steps) -> Any:
    """`slot_of_member` as arithmetic, on numbers or arrays."""
    return slot + sum(
        ((which // inner % size - slot // distance % size) * distance)
        for size, distance, inner in team
    )


class _Number:
    """An int32 of the kernel, for the arithmetic above; none of its values is negative."""

    def __init__(self, value: ir.Value):
        self.value = value

    def _with(self, operation: Any, other: Any) -> _Number:
        other = other.value if isinstance(other, _Number) else _constant(other)
        return _Number(operation(self.value, other))

    def __floordiv__(self, other: int) -> _Number:
        return self._with(arith.divui, other)

    def __mod__(self, other: int) -> _Number:
        return self._with(arith.remui, other)

    def __mul__(self, other: int) -> _Number:
        return self._with(arith.muli, other)

    def __sub__(self, other: Any) -> _Number:
        return self._with(arith.subi, other)

    def __add__(self, other: Any) -> _Number:
        return self._with(arith.addi, other)

    __radd__ = __add__


def _steps(ctx: Any, axes: Sequence[Hashable]) -> Steps:
    info = ctx.module_ctx.mesh_info
    return steps(info.axis_names, info.mesh_shape, axes)


@lowers(member_p, BY_WARPGROUP)
def _member_lowering(ctx, slot, *, axes):
    found = member_of(_Number(int32_value(slot)), _steps(ctx, axes))
    return int32_result(found.value)


@lowers(slot_of_member_p, BY_WARPGROUP)
def _slot_of_member_lowering(ctx, slot, which, *, axes):
    found = slot_of(_Number(int32_value(slot)), _Number(int32_value(which)), _steps(ctx, axes))
    return int32_result(found.value)
