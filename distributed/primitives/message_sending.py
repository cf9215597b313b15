"""Writes a message (`messages`) into a peer's slot of the heap, and keeps turns apart."""

from __future__ import annotations

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive

from stretto.distributed.primitives.messages import STEP, UNIT_WORDS, bits_of, own_unit
from stretto.distributed.primitives.slots import as_int32
from stretto.distributed.private_jax.dialects import arith, ir, llvm
from stretto.distributed.private_jax.kernel_rules import (
    BY_WARPGROUP,
    MEMORY_EFFECT,
    int32_value,
    lowers,
)

FILLING = 1
"""In place of the words that a thread's last unit lacks."""

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
    own = own_unit(slot, word)
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


def _words_of(register: ir.Value) -> list[ir.Value]:
    """The words of a thread's register."""
    i32 = ir.IntegerType.get_signless(32)
    words = bits_of(register.type) // 32
    vector = mgpu_utils.bitcast(register, ir.VectorType.get((words,), i32))
    return [llvm.extractelement(vector, mgpu_utils.c(i, i32)) for i in range(words)]


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
