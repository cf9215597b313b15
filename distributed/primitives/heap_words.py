"""Words of the heap (`heap`) by slot and offset.

Slots are operands, numbers that the program calculates. A kernel that asks Mosaic GPU for its place
among devices is a collective to XLA, which then runs a barrier before it, hands it a table of addresses,
and must not record it. A kernel that has peers by these primitives and by `messages` alone is none.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive

from stretto.distributed.memory import heap
from stretto.distributed.primitives.slots import as_int32
from stretto.distributed.private_jax.dialects import arith, ir
from stretto.distributed.private_jax.kernel_rules import (
    BY_WARPGROUP,
    MEMORY_EFFECT,
    int32_result,
    int32_value,
    lowers,
)


def pointer(slot: Any, word: Any) -> ir.Value:
    """The address of a word of a slot."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.muli(arith.extui(i64, int32_value(slot)), mgpu_utils.c(heap.SLOT_BYTES, i64))
    offset = arith.muli(arith.extui(i64, int32_value(word)), mgpu_utils.c(4, i64))
    base = arith.addi(at, mgpu_utils.c(heap.address(), i64))
    return arith.addi(base, offset)


# --- A word ---------------------------------------------------------------------------------------

read_word_p = Primitive("stretto_read_word")


def read_word(slot: jax.Array, word: int | jax.Array) -> jax.Array:
    """The int32 at `word` (of 4 bytes) of a slot, for all threads of a warpgroup."""
    return read_word_p.bind(as_int32(slot), as_int32(word))


@read_word_p.def_effectful_abstract_eval
def _read_word_abstract_eval(slot, word):
    del slot, word
    return ShapedArray((), jnp.int32), {MEMORY_EFFECT}


@lowers(read_word_p, BY_WARPGROUP)
def _read_word_lowering(ctx, slot, word):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    found = mgpu_utils.inline_ptx(
        "ld.relaxed.sys.global.u32 $0, [$1];",
        pointer(slot, word),
        result_types=i32,
        has_side_effects=True,
    )
    return int32_result(found)


write_word_p = Primitive("stretto_write_word")
write_word_p.multiple_results = True


def write_word(slot: jax.Array, word: int | jax.Array, value: jax.Array) -> None:
    """Stores an int32, once all threads of the warpgroup have come here."""
    write_word_p.bind(as_int32(slot), as_int32(word), as_int32(value))


@write_word_p.def_effectful_abstract_eval
def _write_word_abstract_eval(slot, word, value):
    del slot, word, value
    return [], {MEMORY_EFFECT}


@lowers(write_word_p, BY_WARPGROUP)
def _write_word_lowering(ctx, slot, word, value):
    mgpu_utils.warpgroup_barrier()
    mgpu_utils.inline_ptx(
        "st.relaxed.sys.global.u32 [$0], $1;",
        pointer(slot, word),
        int32_value(value),
        predicate=ctx.module_ctx.single_lane_predicate,
        has_side_effects=True,
    )
    return ()
