"""Waits for a message (`messages`) in this device's slot of the heap; the wait has a limit."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive

from stretto.distributed.memory import mailbox
from stretto.distributed.primitives.bounded_wait import report_ptx
from stretto.distributed.primitives.messages import STEP, UNIT_WORDS, bits_of, own_unit
from stretto.distributed.primitives.slots import as_int32
from stretto.distributed.private_jax.dialects import arith, gpu, ir, llvm, scf
from stretto.distributed.private_jax.kernel_rules import (
    BY_WARPGROUP,
    MEMORY_EFFECT,
    int32_value,
    lowers,
)

AT_ONCE = 8
"""Units that a thread looks at together."""

collect_p = Primitive("stretto_collect")


def collect(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    slot: jax.Array,
    word: int | jax.Array,
    flag: jax.Array,
    *,
    bare: bool,
    sender: jax.Array,
    site: mailbox.Site,
) -> jax.Array:
    """The message at `word` of this device's slot, once all of it is there.

    `sender` is the slot that it comes from, for the report that `site` names: past its limit the
    kernel reports the wait and stops.
    """
    numbers = (as_int32(x) for x in (slot, word, flag, sender))
    return collect_p.bind(
        *numbers, shape=tuple(shape), dtype=jnp.dtype(dtype), bare=bare, site=site
    )


@collect_p.def_effectful_abstract_eval
def _collect_abstract_eval(slot, word, flag, sender, *, shape, dtype, bare, site):
    del slot, word, flag, sender, bare, site
    return ShapedArray(shape, dtype), {MEMORY_EFFECT}


@lowers(collect_p, BY_WARPGROUP)
def _collect_lowering(ctx, slot, word, flag, sender, *, shape, dtype, bare, site):
    del ctx
    element = mgpu_utils.dtype_to_ir_type(dtype)
    layout = mgpu.WGStridedFragLayout(shape, 8 // dtype.itemsize)
    registers = np.empty(layout.registers_shape(shape), object)
    of_one = bits_of(layout.registers_element_type(element)) // 32
    flag, i32 = int32_value(flag), ir.IntegerType.get_signless(32)
    own, words = own_unit(slot, word), []
    units = -(-registers.size * of_one // (UNIT_WORDS if bare else UNIT_WORDS // 2))
    for start in range(0, units, AT_ONCE):
        which = range(start, min(start + AT_ONCE, units))
        found, late = _look(own, which, flag, bare, site.limit_s)
        _report(late, site, int32_value(slot), flag, int32_value(sender))
        words += found
    if bare:
        words = [arith.xori(word, mgpu_utils.c(-1, i32)) for word in words]
    vector_type = ir.VectorType.get((of_one,), i32)
    for i in range(registers.size):
        vector = llvm.mlir_undef(vector_type)
        for j in range(of_one):
            vector = llvm.insertelement(vector, words[of_one * i + j], mgpu_utils.c(j, i32))
        registers.flat[i] = mgpu_utils.bitcast(vector, layout.registers_element_type(element))
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout, _is_signed=mgpu_utils.is_signed(dtype)
    )


def _look(
    own: ir.Value, which: range, flag: ir.Value, bare: bool, limit_s: float
) -> tuple[list[ir.Value], ir.Value]:
    """The data of some units of a thread, whose first is at `own`, once all of it is there.

    And whether it took too long (or 0). Of a bare message the units are zeroed.
    """
    i32 = ir.IntegerType.get_signless(32)
    of_a_unit = UNIT_WORDS if bare else UNIT_WORDS // 2
    *words, late = mgpu_utils.inline_ptx(
        _look_ptx(which, bare, limit_s),
        own,
        flag,
        result_types=(i32,) * (of_a_unit * len(which) + 1),
        has_side_effects=True,
    )
    return words, late


def _look_ptx(which: range, bare: bool, limit_s: float) -> str:
    """PTX of `_look`: $0 and on the data, then whether it timed out, the address, the flag.

    The clock is read only after the first look has failed.
    """
    units = len(which)
    count = (UNIT_WORDS if bare else UNIT_WORDS // 2) * units
    late, first, flag = count, count + 1, count + 2
    if bare:
        tested = [f"${i}" for i in range(count)]
        loaded = [tested[i : i + UNIT_WORDS] for i in range(0, count, UNIT_WORDS)]
        tests = [f"setp.ne.and.b32 p, {word}, 0, p;" for word in tested]
    else:
        loaded = [
            [f"${2 * i}", f"f{2 * i}", f"${2 * i + 1}", f"f{2 * i + 1}"] for i in range(units)
        ]
        tests = [f"setp.eq.and.b32 p, f{j}, ${flag}, p;" for j in range(count)]
    at = [f"[${first}+{unit * STEP}]" for unit in which]
    loads = [
        f"ld.volatile.global.v4.b32 {{{', '.join(words)}}}, {place};"
        for words, place in zip(loaded, at, strict=True)
    ]
    zeroes = [f"st.volatile.global.v4.b32 {place}, {{z, z, z, z}};" for place in at]
    look_at_the_clock = [
        "mov.u64 now, %globaltimer;",
        "setp.eq.u64 p, begin, 0;",
        "@p mov.u64 begin, now;",
        "sub.u64 now, now, begin;",
        f"setp.lt.u64 p, now, {0 if math.isinf(limit_s) else round(limit_s * 1e9)};",
        "@p bra AGAIN;",
        f"mov.u32 ${late}, 1;",
    ]
    return "\n".join(
        [
            "{",
            ".reg .pred p;",
            f".reg .b32 z, f<{2 * units}>;",
            ".reg .u64 now, begin;",
            f"mov.u32 ${late}, 0;",
            "mov.u64 begin, 0;",
            "AGAIN:",
            *loads,
            "setp.eq.u32 p, 0, 0;",
            *tests,
            "@p bra DONE;",
            *(["bra AGAIN;"] if math.isinf(limit_s) else look_at_the_clock),
            "DONE:",
            *(["mov.u32 z, 0;", *zeroes] if bare else []),
            "}",
        ]
    )


def _report(
    late: ir.Value, site: mailbox.Site, slot: ir.Value, flag: ir.Value, sender: ir.Value
) -> None:
    """Leaves a report and stops the kernel, in a thread that was `late`."""
    if math.isinf(site.limit_s):
        return
    i32 = ir.IntegerType.get_signless(32)
    zero = mgpu_utils.c(0, i32)
    if_late = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, late, zero))
    with ir.InsertionPoint(if_late.then_block):
        block = [arith.index_cast(i32, gpu.block_id(d)) for d in gpu.Dimension]
        words = [slot, *block, flag, zero, mgpu_utils.c(1, i32), sender]
        mgpu_utils.inline_ptx(
            report_ptx(len(words)),
            mgpu_utils.c(mailbox.register(site), i32),
            *words,
            has_side_effects=True,
        )
        scf.YieldOp([])
