"""The kernel of `all_reduce_rms_norm` by messages through the heap, in one shot (`by_heap`).

A block takes a row at a time, a turn each: it sends its device's row to every peer, receives theirs,
adds them up in float32 in the order of the team, rounds once to the new residual, and normalises what
it rounded. A row stays in the registers of one warpgroup.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed import posting, schedule
from stretto.distributed.memory import heap
from stretto.distributed.team import Team
from stretto.kernels.collectives import by_heap
from stretto.kernels.problem.problem import Problem

RECORDED_TO = 138 * 6144 * 2
"""Bytes of x up to which it was measured in recorded programs."""
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
    return posting.obstacle(team_size, posting.words_of(n, dtype))


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

    def body(mail, x_ref, residual_ref, weight_ref, total_ref, out_ref):
        own = schedule.share(m, mail.block, num_blocks)

        def one(turn: jax.Array, _: None) -> None:
            row = mail.block + turn * num_blocks
            mail.send(x_ref[row], turn)
            added = _rounded_sum(mail, x_ref, residual_ref, row, turn)
            total_ref[row] = added
            wide = added.astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(wide * wide) / n + epsilon)
            weights = weight_ref[...].astype(jnp.float32)
            out_ref[row] = (wide * scale * weights).astype(x.dtype)

        lax.fori_loop(0, own, one, None)
        mail.close(own)

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
        invariant=True,
        interpret=interpret,
    )
    return total, out


def _rounded_sum(mail: Any, x_ref: Any, residual_ref: Any, row: Any, turn: Any) -> jax.Array:
    """The new residual of a row: loads of this device's come before what is waited for."""
    own, before = x_ref[row].astype(jnp.float32), residual_ref[row].astype(jnp.float32)
    message = x_ref.shape[1:], x_ref.dtype, turn
    if mail.in_order:  # This device's is among those received.

        def term(member: Any) -> jax.Array:
            return mail.receive_from(member, *message).astype(jnp.float32)

        rest = lambda member, total: total + term(member)  # noqa: E731
        total = lax.fori_loop(1, mail.team.size, rest, term(jnp.int32(0)))
    else:  # Of two the order does not matter.
        ((_, value),) = mail.receive(*message)
        total = own + value.astype(jnp.float32)
    return (total + before).astype(residual_ref.dtype)
