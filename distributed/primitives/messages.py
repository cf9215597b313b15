"""Messages in the heap (`heap`) whose words say by themselves that they have come.

A message is written into a peer's slot in units of 16 bytes, and the reader looks at its own slot until
every word is there. So a message needs no fence, no semaphore and no barrier: it takes one way over
the links.

| form | a unit holds | a word is there | for |
|---|---|---|---|
| flagged | two words, each beside a flag | once its flag is the one that is expected | any bits |
| bare | four words, each bit inverted | once it is not zero | floating-point numbers |

The hardware writes and reads a word and its flag at once. A bare message takes half the bytes. Where
none lies that is still to be read, its memory is zero: whoever reads a message zeroes it. A word that
would be zero, 32 ones, is a NaN, or two of 16 bits, and another NaN is sent in its place.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive

from stretto.distributed.memory import mailbox
from stretto.distributed.primitives.bounded_wait import report_ptx
from stretto.distributed.primitives.heap_words import pointer
from stretto.distributed.primitives.slots import as_int32
from stretto.distributed.private_jax.dialects import arith, gpu, ir, llvm, scf
from stretto.distributed.private_jax.kernel_rules import (
    BY_WARPGROUP,
    MEMORY_EFFECT,
    int32_value,
    lowers,
)

THREADS = 128
UNIT_WORDS = 4
STEP = 4 * UNIT_WORDS * THREADS
"""Bytes from one unit of a thread to its next."""
AT_ONCE = 8
"""Units that a thread looks at together."""
FILLING = 1
"""In place of the words that a thread's last unit lacks."""


def words_of_message(size: int, dtype: jax.typing.DTypeLike, *, bare: bool) -> int:
    """Words of memory that a message of so many elements takes."""
    words = size * jnp.dtype(dtype).itemsize // 4
    if not bare:
        return 2 * words
    of_all_threads = UNIT_WORDS * THREADS
    return -(-words // of_all_threads) * of_all_threads


# --- Sending --------------------------------------------------------------------------------------

post_p = Primitive("stretto_post")
post_p.multiple_results = True


def post(
    x: jax.Array, slot: jax.Array, word: int | jax.Array, flag: jax.Array, *, bare: bool
) -> None:
    """Writes `x` to `word` of a slot; by one warpgroup, whose every thread has a part.

    `x` has a multiple of 128 x 8 bytes. Of a bare message `flag` names the turn, for the simulator.
    """
    post_p.bind(x, as_int32(slot), as_int32(word), as_int32(flag), bare=bare)


@post_p.def_effectful_abstract_eval
def _post_abstract_eval(x, slot, word, flag, *, bare):
    del x, slot, word, flag, bare
    return [], {MEMORY_EFFECT}


@lowers(post_p, BY_WARPGROUP)
def _post_lowering(ctx, x, slot, word, flag, *, bare):
    del ctx
    if not isinstance(x.layout, mgpu.WGStridedFragLayout):
        raise NotImplementedError(f"a message in the layout {x.layout}")
    own = _own_unit(slot, word)
    words = [word for register in x.registers.flat for word in _words_of(register)]
    if bare:
        _store_units(own, [_inverted(word) for word in words])
    else:
        flag = int32_value(flag)
        _store_units(own, [unit for word in words for unit in (word, flag)])
    return ()


def _store_units(own: ir.Value, words: list[ir.Value]) -> None:
    """Writes this thread's units, from its first at `own` on, to a peer or here."""
    filling = mgpu_utils.c(FILLING, ir.IntegerType.get_signless(32))
    words = words + [filling] * (-len(words) % UNIT_WORDS)
    for i in range(0, len(words), UNIT_WORDS):
        mgpu_utils.inline_ptx(
            f"st.volatile.global.v4.b32 [$0+{i // UNIT_WORDS * STEP}], {{$1, $2, $3, $4}};",
            own,
            *words[i : i + UNIT_WORDS],
            has_side_effects=True,
        )


def _inverted(word: ir.Value) -> ir.Value:
    """The word as a bare message holds it, which is never zero."""
    i32 = ir.IntegerType.get_signless(32)
    inverted = arith.xori(word, mgpu_utils.c(-1, i32))
    return arith.maxui(inverted, mgpu_utils.c(1, i32))


def _own_unit(slot: Any, word: Any) -> ir.Value:
    """Where this thread's first unit is, after those of the threads before; the next by `STEP`."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(
        arith.index_cast(i64, gpu.thread_id(gpu.Dimension.x)), mgpu_utils.c(THREADS, i64)
    )
    return arith.addi(pointer(slot, word), arith.muli(thread, mgpu_utils.c(4 * UNIT_WORDS, i64)))


def _words_of(register: ir.Value) -> list[ir.Value]:
    """The words of a thread's register."""
    i32 = ir.IntegerType.get_signless(32)
    words = _bits(register.type) // 32
    vector = mgpu_utils.bitcast(register, ir.VectorType.get((words,), i32))
    return [llvm.extractelement(vector, mgpu_utils.c(i, i32)) for i in range(words)]


def _bits(vector: Any) -> int:
    vector = ir.VectorType(vector)
    bits = math.prod(vector.shape) * mgpu_utils.bitwidth(vector.element_type)
    if bits % 64:
        raise NotImplementedError(f"a message of {vector} a thread, which is not whole units")
    return bits


fence_p = Primitive("stretto_fence_between_turns")
fence_p.multiple_results = True


def fence_between_turns(turn: int | jax.Array) -> None:
    """In each turn of a launch but the first: what this thread zeroed is zero before it sends."""
    fence_p.bind(as_int32(turn))


@fence_p.def_effectful_abstract_eval
def _fence_abstract_eval(turn):
    del turn
    return [], {MEMORY_EFFECT}


@lowers(fence_p, BY_WARPGROUP)
def _fence_lowering(ctx, turn):
    del ctx
    mgpu_utils.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p fence.acq_rel.sys; }",
        int32_value(turn),
        has_side_effects=True,
    )
    return ()


# --- Receiving ------------------------------------------------------------------------------------

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
    of_one = _bits(layout.registers_element_type(element)) // 32
    flag, i32 = int32_value(flag), ir.IntegerType.get_signless(32)
    own, words = _own_unit(slot, word), []
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
