"""Words of the heap (`heap`) by slot and offset, and messages whose words say that they have come.

A message is written into a peer's slot two words of data at a time, each beside a flag: 16 bytes that
the hardware writes and reads at once, in two halves of a word and its flag. The reader looks at its own
slot until every flag is the one that it expects. So a message needs no fence, no semaphore and no
barrier: it takes one way over the links. It takes twice its bytes.

Slots are operands, numbers that the program calculates. A kernel that asks Mosaic GPU for its place
among devices is a collective to XLA, which then runs a barrier before it, hands it a table of addresses,
and must not record it. A kernel that has peers by these primitives alone is none.
Private JAX, checked on 0.11.2 and 0.12.0.1.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering as gpu_lowering
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from stretto.distributed.memory import heap, mailbox
from stretto.distributed.primitives.bounded_wait import report_ptx
from stretto.distributed.primitives.slots import as_int32, ir_int32, lowers

THREADS = 128
UNIT_WORDS = 4
"""Of memory for each two words of a message."""
STEP = 4 * UNIT_WORDS * THREADS
"""Bytes from one unit of a thread to its next."""
AT_ONCE = 8
"""Units that a thread looks at together."""


def _pointer(slot: Any, word: Any) -> ir.Value:
    """The address of a word of a slot."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.muli(arith.extui(i64, ir_int32(slot)), mgpu_utils.c(heap.SLOT_BYTES, i64))
    offset = arith.muli(arith.extui(i64, ir_int32(word)), mgpu_utils.c(4, i64))
    base = arith.addi(at, mgpu_utils.c(heap.address(), i64))
    return arith.addi(base, offset)


# --- A word ---------------------------------------------------------------------------------------

read_word_p = jax_core.Primitive("stretto_read_word")


def read_word(slot: jax.Array, word: int | jax.Array) -> jax.Array:
    """The int32 at `word` (of 4 bytes) of a slot, for all threads of a warpgroup."""
    return read_word_p.bind(as_int32(slot), as_int32(word))


@read_word_p.def_effectful_abstract_eval
def _read_word_abstract_eval(slot, word):
    del slot, word
    return jax_core.ShapedArray((), jnp.int32), {gpu_core._memory_effect}


@lowers(read_word_p)
def _read_word_lowering(ctx, slot, word):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    found = mgpu_utils.inline_ptx(
        "ld.relaxed.sys.global.u32 $0, [$1];",
        _pointer(slot, word),
        result_types=i32,
        has_side_effects=True,
    )
    return gpu_lowering._ensure_fa(found, jnp.int32)


write_word_p = jax_core.Primitive("stretto_write_word")
write_word_p.multiple_results = True


def write_word(slot: jax.Array, word: int | jax.Array, value: jax.Array) -> None:
    """Stores an int32, once all threads of the warpgroup have come here."""
    write_word_p.bind(as_int32(slot), as_int32(word), as_int32(value))


@write_word_p.def_effectful_abstract_eval
def _write_word_abstract_eval(slot, word, value):
    del slot, word, value
    return [], {gpu_core._memory_effect}


@lowers(write_word_p)
def _write_word_lowering(ctx, slot, word, value):
    mgpu_utils.warpgroup_barrier()
    mgpu_utils.inline_ptx(
        "st.relaxed.sys.global.u32 [$0], $1;",
        _pointer(slot, word),
        ir_int32(value),
        predicate=ctx.module_ctx.single_lane_predicate,
        has_side_effects=True,
    )
    return ()


# --- A message ------------------------------------------------------------------------------------

post_p = jax_core.Primitive("stretto_post")
post_p.multiple_results = True


def words_of_message(size: int, dtype: jax.typing.DTypeLike) -> int:
    """Words of memory that a message of so many elements takes."""
    return 2 * (size * jnp.dtype(dtype).itemsize // 4)


def post(x: jax.Array, slot: jax.Array, word: int | jax.Array, flag: jax.Array) -> None:
    """Writes `x` with flags to `word` of a slot; by one warpgroup, whose every thread has a part.

    `x` has a multiple of 128 x 8 bytes.
    """
    post_p.bind(x, as_int32(slot), as_int32(word), as_int32(flag))


@post_p.def_effectful_abstract_eval
def _post_abstract_eval(x, slot, word, flag):
    del x, slot, word, flag
    return [], {gpu_core._memory_effect}


@lowers(post_p)
def _post_lowering(ctx, x, slot, word, flag):
    del ctx
    if not isinstance(x.layout, mgpu.WGStridedFragLayout):
        raise NotImplementedError(f"a message in the layout {x.layout}")
    flag = ir_int32(flag)
    units = [unit for register in x.registers.flat for unit in _units_of(register)]
    own = _own_unit(slot, word)
    for i, (low, high) in enumerate(units):
        mgpu_utils.inline_ptx(
            f"st.volatile.global.v4.b32 [$0+{i * STEP}], {{$1, $2, $3, $4}};",
            own,
            low,
            flag,
            high,
            flag,
            has_side_effects=True,
        )
    return ()


def _own_unit(slot: Any, word: Any) -> ir.Value:
    """Where this thread's first unit is, after those of the threads before; the next by `STEP`."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(
        arith.index_cast(i64, gpu.thread_id(gpu.Dimension.x)), mgpu_utils.c(THREADS, i64)
    )
    return arith.addi(_pointer(slot, word), arith.muli(thread, mgpu_utils.c(4 * UNIT_WORDS, i64)))


def _units_of(register: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """The words of a thread's register, two by two."""
    i32 = ir.IntegerType.get_signless(32)
    words = _bits(register.type) // 32
    vector = mgpu_utils.bitcast(register, ir.VectorType.get((words,), i32))
    found = [llvm.extractelement(vector, mgpu_utils.c(i, i32)) for i in range(words)]
    return list(zip(found[::2], found[1::2], strict=True))


def _bits(vector: Any) -> int:
    vector = ir.VectorType(vector)
    bits = math.prod(vector.shape) * mgpu_utils.bitwidth(vector.element_type)
    if bits % 64:
        raise NotImplementedError(f"a message of {vector} a thread, which is not whole units")
    return bits


collect_p = jax_core.Primitive("stretto_collect")


def collect(
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    slot: jax.Array,
    word: int | jax.Array,
    flag: jax.Array,
    *,
    sender: jax.Array,
    site: mailbox.Site,
) -> jax.Array:
    """The message at `word` of this device's slot, once all of it carries `flag`.

    `sender` is the slot that it comes from, for the report that `site` names: past its limit the
    kernel reports the wait and stops.
    """
    numbers = (as_int32(x) for x in (slot, word, flag, sender))
    return collect_p.bind(*numbers, shape=tuple(shape), dtype=jnp.dtype(dtype), site=site)


@collect_p.def_effectful_abstract_eval
def _collect_abstract_eval(slot, word, flag, sender, *, shape, dtype, site):
    del slot, word, flag, sender, site
    return jax_core.ShapedArray(shape, dtype), {gpu_core._memory_effect}


@lowers(collect_p)
def _collect_lowering(ctx, slot, word, flag, sender, *, shape, dtype, site):
    del ctx
    element = mgpu_utils.dtype_to_ir_type(dtype)
    layout = mgpu.WGStridedFragLayout(shape, 8 // dtype.itemsize)
    registers = np.empty(layout.registers_shape(shape), object)
    register_type = layout.registers_element_type(element)
    units = _bits(register_type) // 64
    own, count = _own_unit(slot, word), registers.size * units
    flag, words = ir_int32(flag), []
    for start in range(0, count, AT_ONCE):
        which = range(start, min(start + AT_ONCE, count))
        found, late = _look(own, which, flag, site.limit_s)
        _report(late, site, ir_int32(slot), flag, ir_int32(sender))
        words += found
    vector_type = ir.VectorType.get((2 * units,), ir.IntegerType.get_signless(32))
    for i in range(registers.size):
        vector = llvm.mlir_undef(vector_type)
        for j in range(2 * units):
            at = mgpu_utils.c(j, ir.IntegerType.get_signless(32))
            vector = llvm.insertelement(vector, words[2 * units * i + j], at)
        registers.flat[i] = mgpu_utils.bitcast(vector, register_type)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout, _is_signed=mgpu_utils.is_signed(dtype)
    )


def _look(
    own: ir.Value, which: range, flag: ir.Value, limit_s: float
) -> tuple[list[ir.Value], ir.Value]:
    """The words of some units of a thread, whose first is at `own`, once all carry the flag.

    And whether it took too long (or 0).
    """
    i32 = ir.IntegerType.get_signless(32)
    *words, late = mgpu_utils.inline_ptx(
        _look_ptx(which, limit_s),
        own,
        flag,
        result_types=(i32,) * (2 * len(which) + 1),
        has_side_effects=True,
    )
    return words, late


def _look_ptx(which: range, limit_s: float) -> str:
    """PTX of `_look`: $0 and on the words, then whether it timed out, the address, the flag.

    The clock is read only after the first look has failed.
    """
    units = len(which)
    late, first, flag = 2 * units, 2 * units + 1, 2 * units + 2
    loads = [
        f"ld.volatile.global.v4.b32 {{${2 * i}, f{2 * i}, ${2 * i + 1}, f{2 * i + 1}}},"
        f" [${first}+{unit * STEP}];"
        for i, unit in enumerate(which)
    ]
    tests = [f"setp.eq.and.b32 p, f{j}, ${flag}, p;" for j in range(2 * units)]
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
            f".reg .b32 f<{2 * units}>;",
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
