"""The kernel of `all_reduce_rms_norm` by messages through the heap, in one shot (`by_heap`).

A block takes as many rows in a turn as it has room for. It sends its device's rows to every peer, receives theirs, adds them
up in float32 in the order of the team, rounds once to the new residual, and normalises what it rounded.
A row stays in the registers of one warpgroup. The messages are bare (`messages`): with flags they would
take twice the bytes, and the links' rate is what limits 138 rows of 6144.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import posting, schedule
from stretto.distributed.memory import heap
from stretto.distributed.team import Team
from stretto.kernels.collectives import by_heap
from stretto.kernels.problem.problem import Problem

RECORDED_TO = 4096 * 8192 * 2
"""Bytes of x up to which it was measured to be faster than XLA in recorded programs."""
UNRECORDED_TO = 512 * 6144 * 2
"""The same in others; beyond, the kernel that reads its peers' operands is as fast, or faster."""
MOST_COLUMNS = 8192
"""Of which a thread's part fits in its registers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(by_heap.Config):
    """How rows are shared out, as for the small collectives."""

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        for num_blocks in (heap.CHANNELS, 64):
            yield Config(num_blocks=num_blocks)


def obstacle(team_size: int, n: int, dtype: Any) -> str | None:
    """Why rows of `n` elements cannot be exchanged so, None if they can."""
    itemsize = jnp.dtype(dtype).itemsize
    if n > MOST_COLUMNS or n * itemsize % 1024 or n % 512:
        return f"it takes rows of a multiple of 512 elements up to {MOST_COLUMNS}, not n={n}."
    return posting.obstacle(team_size, posting.words_of(n, dtype, bare=True), bare=True)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    team: Team,
    *,
    epsilon: float,
    config: Config = Config(),
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`[m, n]`, `[m, n]`, `[n]` -> (residual + sum of x, its normalised rows times weight)."""
    m, n = x.shape
    num_blocks = config.blocks_for(m)
    words = posting.words_of(n, x.dtype, bare=True)
    of_a_turn = posting.room(bare=True) // words

    def body(mail, x_ref, residual_ref, weight_ref, total_ref, out_ref):
        own = schedule.share(m, mail.block, num_blocks)
        turns = schedule.div(own + of_a_turn - 1, of_a_turn)

        def turn(number: jax.Array, _: None) -> None:
            first = number * of_a_turn
            count = jnp.minimum(own - first, of_a_turn)

            def each(do: Callable[[jax.Array, jax.Array], None]) -> None:
                def one(i: jax.Array, _: None) -> None:
                    do(mail.block + (first + i) * num_blocks, i * words)

                lax.fori_loop(0, count, one, None)

            def finish(row: jax.Array, word: jax.Array) -> None:
                weights = _like_messages(weight_ref, x.dtype)
                added = _rounded_sum(mail, x_ref, residual_ref, row, number, word)
                total_ref[row] = added
                wide = added.astype(jnp.float32)
                scale = lax.rsqrt(jnp.sum(wide * wide) / n + epsilon)
                out_ref[row] = (wide * scale * weights).astype(x.dtype)

            each(lambda row, word: mail.send(x_ref[row], number, word))
            each(finish)

        lax.fori_loop(0, turns, turn, None)
        mail.close(turns)

    total, out = posting.launch(
        body,
        x,
        residual,
        weight,
        name="all_reduce_rms_norm_by_heap",
        team=team,
        out_type=[
            jax.ShapeDtypeStruct((m, n), residual.dtype),
            jax.ShapeDtypeStruct((m, n), x.dtype),
        ],
        num_blocks=num_blocks,
        in_order=team.size > 2,
        bare=True,
        invariant=True,
        interpret=interpret,
    )
    return total, out


def _rounded_sum(
    mail: Any, x_ref: Any, residual_ref: Any, row: Any, turn: Any, word: Any
) -> jax.Array:
    """The new residual of a row: loads of this device's come before what is waited for."""
    own = x_ref[row].astype(jnp.float32)
    before = _like_messages(residual_ref.at[row], x_ref.dtype)
    message = x_ref.shape[1:], x_ref.dtype, turn, word
    if mail.in_order:  # This device's is among those received.

        def term(member: Any) -> jax.Array:
            return mail.receive_from(member, *message).astype(jnp.float32)

        rest = lambda member, total: total + term(member)  # noqa: E731
        total = lax.fori_loop(1, mail.team.size, rest, term(jnp.int32(0)))
    else:  # Of two the order does not matter.
        ((_, value),) = mail.receive(*message)
        total = own + value.astype(jnp.float32)
    return (total + before).astype(residual_ref.dtype)


def _like_messages(row_ref: Any, dtype: Any) -> jax.Array:
    """A row in float32, of which a thread has the elements that it has of a message of `dtype`."""
    layout = plgpu.Layout.WG_STRIDED(row_ref.shape, vec_size=8 // dtype.itemsize)
    return plgpu.load(row_ref, layout=layout, optimized=False).astype(jnp.float32)
