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
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from stretto.distributed.primitives.heap_words import pointer
from stretto.distributed.private_jax.dialects import arith, gpu, ir

THREADS = 128
UNIT_WORDS = 4
STEP = 4 * UNIT_WORDS * THREADS
"""Bytes from one unit of a thread to its next."""


def words_of_message(size: int, dtype: jax.typing.DTypeLike, *, bare: bool) -> int:
    """Words of memory that a message of so many elements takes."""
    words = size * jnp.dtype(dtype).itemsize // 4
    if not bare:
        return 2 * words
    of_all_threads = UNIT_WORDS * THREADS
    return -(-words // of_all_threads) * of_all_threads


def own_unit(slot: Any, word: Any) -> ir.Value:
    """Where this thread's first unit is, after those of the threads before; the next by `STEP`."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(
        arith.index_cast(i64, gpu.thread_id(gpu.Dimension.x)), mgpu_utils.c(THREADS, i64)
    )
    return arith.addi(pointer(slot, word), arith.muli(thread, mgpu_utils.c(4 * UNIT_WORDS, i64)))


def bits_of(vector: Any) -> int:
    """Bits of a thread's register, of a vector type; NotImplementedError unless whole units."""
    vector = ir.VectorType(vector)
    bits = math.prod(vector.shape) * mgpu_utils.bitwidth(vector.element_type)
    if bits % 64:
        raise NotImplementedError(f"a message of {vector} a thread, which is not whole units")
    return bits
