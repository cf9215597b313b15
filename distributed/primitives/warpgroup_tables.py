"""Device code for tables of a warpgroup: how many equal numbers come before each, and look-ups.

Pallas would compare each number with each other one, or with each index, and a comparison takes a
thread two cycles. A warp has an instruction that finds which of its threads have equal numbers, and
each thread can read from shared memory what it wants. The simulator runs the equivalent in numpy
(`device_code`). Mosaic GPU's dialects are private JAX, checked on 0.11.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.primitives.device_code import with_equivalent
from stretto.distributed.private_jax.dialects import arith, ir, llvm, vector

WARPGROUP = 128
WORDS = 2
"""Of scratch for each value: how many the vectors before have, and a byte of each warp's own."""

# Of a thread's number, $2, how many equal ones earlier threads of the warp have, $0, and all of the
# warp, $1. The first one of them notes how many they are in the warp's byte; $3 is that of value 0,
# and $4 the number of values.
_NOTE = """{
.reg .pred valid, leads; .reg .b32 same, place;
match.any.sync.b32 same, $2, 0xffffffff;
popc.b32 $1, same;
mov.u32 place, %lanemask_lt;
and.b32 same, same, place;
popc.b32 $0, same;
setp.lt.u32 valid, $2, $4;
setp.eq.and.u32 leads, $0, 0, valid;
mad.lo.u32 place, $2, 8, $3;
@leads st.shared.u8 [place], $1;
}"""
# $0, the rank of a number, $2: to $1, those in the warp, come those of the vectors before and those
# of the warps before. $3 is the place of value 0, and $4 the number of values. $5 leaves the bytes
# of the warps before, which a product adds up.
_LOOK = """{
.reg .pred valid; .reg .b32 place, vectors, warps;
setp.lt.u32 valid, $2, $4;
mad.lo.u32 place, $2, 8, $3;
mov.b32 vectors, 0; mov.b32 warps, 0;
@valid ld.shared.v2.b32 {vectors, warps}, [place];
and.b32 warps, warps, $5;
mul.lo.u32 warps, warps, 0x01010101;
shr.u32 warps, warps, 24;
add.u32 vectors, vectors, warps;
add.u32 vectors, vectors, $1;
selp.b32 $0, vectors, 0, valid;
}"""
# $0, $1, $2 and $4 are those of `_NOTE`. The first thread adds the warp's to those of the vectors
# before, of which $3 is the place of value 0, and clears the warp's byte, $5 that of value 0.
_ADD = """{
.reg .pred valid, leads; .reg .b32 place, zero;
setp.lt.u32 valid, $2, $4;
setp.eq.and.u32 leads, $0, 0, valid;
mad.lo.u32 place, $2, 8, $3;
@leads red.shared.add.u32 [place], $1;
mad.lo.u32 place, $2, 8, $5;
mov.b32 zero, 0;
@leads st.shared.u8 [place], zero;
}"""


def room_of(values: int) -> int:
    """Counts that `ranks_and_counts` returns of so many values, with zeros up to whole vectors."""
    return -(-values // WARPGROUP) * WARPGROUP


def ranks_and_counts(x: jax.Array, values: int, scratch: Any) -> jax.Array:
    """For each number how many equal ones come before it, then for each value how many there are.

    Called by a warpgroup. Numbers that are no value (from 0 to `values - 1`) have rank 0.

    Args:
      x: int32 `[n]`, n a multiple of 128, an element a thread.
      values: how many there are.
      scratch: shared memory of the warpgroup alone, int32 `[WORDS * room_of(values)]`.

    Returns:
      int32 `[n + room_of(values)]`, an element a thread.
    """
    shape = (x.shape[0] + room_of(values),)
    inline = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED(x.shape, 1), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(
            shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, 1)
        ),
    )
    return inline(_ranks_and_counts(values))(x, scratch)


def looked_up(table: jax.Array, index: jax.Array, scratch: Any) -> jax.Array:
    """`table[index]`, of the last element where an index is past it. Called by a warpgroup.

    Args:
      table: int32 `[m]`, m a multiple of 128, an element a thread.
      index: int32 `[n]`, likewise; as numbers without a sign.
      scratch: shared memory of the warpgroup alone, int32, at least as many as the table has.

    Returns:
      int32 `[n]`, an element a thread.
    """
    layouts = [plgpu.Layout.WG_STRIDED(x.shape, 1) for x in (table, index)]
    inline = plgpu.inline_mgpu(
        arg_types=(*layouts, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layouts[1]),
    )
    return inline(_looked_up)(table, index, scratch)


@with_equivalent(lambda table, x: table[np.minimum(x.astype(np.uint32), table.size - 1)])
def _looked_up(
    _: Any, table: mgpu.FragmentedArray, index: mgpu.FragmentedArray, scratch: ir.Value
) -> mgpu.FragmentedArray:
    (last,) = table.shape
    base, first = _places(scratch, 4)
    for i, register in enumerate(table.registers.flat):
        _inline(None, f"st.shared.b32 [$0+{4 * WARPGROUP * i}], $1;", first, _word(register))
    mgpu_utils.warpgroup_barrier()
    found = []
    for register in index.registers.flat:
        place = arith.minui(_word(register), _constant(last - 1))
        place = arith.addi(base, arith.muli(place, _constant(4)))
        found.append(_inline(_int32(), "ld.shared.b32 $0, [$1];", place))
    mgpu_utils.warpgroup_barrier()  # Before the scratch is used again.
    return _array(found)


def _in_numpy(x: np.ndarray, values: int) -> np.ndarray:
    valid = (x >= 0) & (x < values)
    ranks = np.tril(x[:, None] == x[None, :], -1).sum(axis=1) * valid
    return np.concatenate([ranks, np.bincount(x[valid], minlength=room_of(values))])


@functools.cache  # One function for each number: JAX compares kernels by it.
def _ranks_and_counts(values: int) -> Callable[..., mgpu.FragmentedArray]:
    @with_equivalent(lambda x: _in_numpy(x, values))
    def found(_: Any, x: mgpu.FragmentedArray, scratch: ir.Value) -> mgpu.FragmentedArray:
        warpgroup = _Warpgroup(scratch, values)
        warpgroup.clear()
        ranks = [warpgroup.ranks(_word(register)) for register in x.registers.flat]
        return _array([*ranks, *warpgroup.counts()])

    return found


class _Warpgroup:
    """What its threads do, as MLIR: they rank one vector after another.

    Attributes:
      places: values of a thread.
      base, first: addresses of the words of value 0, and of a thread's first value.
      noted: address of the warp's byte of value 0.
      below: a mask of the bytes of the warps before.
    """

    def __init__(self, scratch: ir.Value, values: int) -> None:
        self.places = room_of(values) // WARPGROUP
        warp = arith.shrui(_thread(), _constant(5))
        self.values = _constant(values)
        self.base, self.first = _places(scratch, 4 * WORDS)
        self.noted = arith.addi(arith.addi(self.base, _constant(4)), warp)
        shift = arith.muli(warp, _constant(8))
        self.below = arith.subi(arith.shli(_constant(1), shift), _constant(1))

    def clear(self) -> None:
        """Before the first vector."""
        for i in range(self.places):
            text = f"st.shared.v2.b32 [$0+{4 * WORDS * WARPGROUP * i}], {{$1, $1}};"
            _inline(None, text, self.first, _constant(0))
        mgpu_utils.warpgroup_barrier()

    def ranks(self, x: ir.Value) -> ir.Value:
        """Of a vector's numbers, which are added to those before."""
        pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
        noted = _inline(pair, _NOTE, x, self.noted, self.values)
        before, alike = (llvm.extractvalue(_int32(), noted, [i]) for i in range(2))
        mgpu_utils.warpgroup_barrier()
        rank = _inline(_int32(), _LOOK, before, x, self.base, self.values, self.below)
        mgpu_utils.warpgroup_barrier()
        _inline(None, _ADD, before, alike, x, self.base, self.values, self.noted)
        mgpu_utils.warp_barrier()
        return rank

    def counts(self) -> list[ir.Value]:
        """Of a thread's values."""
        mgpu_utils.warpgroup_barrier()
        found = []
        for i in range(self.places):
            text = f"ld.shared.b32 $0, [$1+{4 * WORDS * WARPGROUP * i}];"
            found.append(_inline(_int32(), text, self.first))
        mgpu_utils.warpgroup_barrier()  # Before it is cleared again.
        return found


def _thread() -> ir.Value:
    """Of the warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), _constant(WARPGROUP))


def _places(scratch: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """(address of the scratch, of a thread's first element of `size` bytes there)."""
    base = llvm.ptrtoint(_int32(), mgpu_utils.memref_ptr(scratch))
    return base, arith.addi(base, arith.muli(_thread(), _constant(size)))


def _inline(result: ir.Type | None, text: str, *operands: ir.Value) -> Any:
    """PTX; all its operands and results are words."""
    kind = ir.Type.parse("!llvm.void") if result is None else result
    outs = 0 if result is None else 1 if result == _int32() else 2
    constraints = ",".join(["=r"] * outs + ["r"] * len(operands))
    return llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=True)


def _int32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> ir.Value:
    return arith.constant(_int32(), ir.IntegerAttr.get(_int32(), value))


def _word(register: ir.Value) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _array(words: list[ir.Value]) -> mgpu.FragmentedArray:
    shape = (WARPGROUP * len(words),)
    registers = np.empty((len(words),), dtype=object)
    for i, word in enumerate(words):
        registers[i] = vector.broadcast(ir.VectorType.get((1,), _int32()), word)
    layout = mgpu.WGStridedFragLayout(shape=shape, vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
