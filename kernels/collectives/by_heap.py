"""Small collectives by messages through the heap: `all_gather` and `all_reduce`, in one shot.

Every device sends all of its array to every peer and computes all of the result. XLA takes such a
kernel for one of a single device: no barrier, no table of addresses, and it may be recorded
(`posting`, which has the protocol as a table). A message takes twice its bytes, but for sums of
floating-point numbers, so this is for arrays that take less time than a launch.

Arrays come as rows of whole messages. A block has every `num_blocks`-th row, and a turn as many of
them as its room holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stretto.distributed import posting, schedule
from stretto.distributed.memory import heap
from stretto.distributed.posting import Mail
from stretto.distributed.team import Team
from stretto.kernels.collectives.summation import add_up
from stretto.kernels.problem.problem import Problem

ROW_BYTES = 1024
"""Of the shortest row: 8 bytes for each thread."""
WIDEST = 4
"""A row has this many times as many bytes, where enough rows are left for all blocks."""
ROWS_OF_A_TURN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a small collective is exchanged through the heap.

    Attributes:
      num_blocks: blocks that exchange; as many at most as leave a sixteenth of a device free.
    """

    num_blocks: int = heap.CHANNELS

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless each block has a channel."""
        del problem
        if not 1 <= self.num_blocks <= heap.CHANNELS:
            raise ValueError(
                f"num_blocks={self.num_blocks} must be from 1 to {heap.CHANNELS}, the channels of"
                " the heap."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        for num_blocks in (heap.CHANNELS, 64, 32):
            yield Config(num_blocks=num_blocks)

    def blocks_for(self, rows: int) -> int:
        """Blocks of a kernel that exchanges so many rows."""
        return min(self.num_blocks, rows, posting.most_blocks())


def to_rows(x: jax.Array, config: Config) -> jax.Array:
    """`x` as rows for the kernels here, `[rows, columns]`; zeros fill it up, which copies it."""
    elements = ROW_BYTES // x.dtype.itemsize
    flat = x.reshape(-1)
    missing = -flat.size % elements
    if missing:
        flat = jnp.pad(flat, (0, missing))
    rows = flat.size // elements
    blocks = config.blocks_for(rows)
    width = max((w for w in (1, 2, WIDEST) if rows % w == 0 and rows // w >= blocks), default=1)
    return flat.reshape(rows // width, elements * width)


def from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_rows` for an array of `shape`."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def all_reduce(
    x: jax.Array, team: Team, *, op: str = "sum", config: Config = Config(), interpret: Any = None
) -> jax.Array:
    """`[rows, columns]` -> the same, summed (or by `op`), bitwise the same on every device."""

    def combine(mail: Mail, own: jax.Array, received: list[tuple[Any, jax.Array]]) -> jax.Array:
        values = [value for _, value in received]
        # Of two the order does not matter; of more, this device's is among those received.
        return add_up(op, values if mail.in_order else [own, *values]).astype(own.dtype)

    def body(mail, x_ref, out_ref):
        def finish(row: Any, received: list[tuple[Any, jax.Array]]) -> None:
            out_ref[row] = combine(mail, x_ref[row], received)

        _exchange(mail, x_ref, num_blocks, finish)

    num_blocks = config.blocks_for(x.shape[0])
    (out,) = posting.launch(
        body,
        x,
        name="all_reduce_by_heap",
        team=team,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        num_blocks=num_blocks,
        in_order=team.size > 2,
        bare=jnp.issubdtype(x.dtype, jnp.floating),
        invariant=True,
        interpret=interpret,
    )
    return out


def all_gather(
    x: jax.Array,
    team: Team,
    *,
    config: Config = Config(),
    invariant: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """`[rows, columns]` -> `[size, rows, columns]`: everybody's, in the order of the team."""

    def body(mail, x_ref, out_ref):
        def finish(row: Any, received: list[tuple[Any, jax.Array]]) -> None:
            out_ref[mail.member(), row] = x_ref[row]
            for member, value in received:
                out_ref[member, row] = value

        _exchange(mail, x_ref, num_blocks, finish)

    num_blocks = config.blocks_for(x.shape[0])
    (out,) = posting.launch(
        body,
        x,
        name="all_gather_by_heap",
        team=team,
        out_type=[jax.ShapeDtypeStruct((team.size, *x.shape), x.dtype)],
        num_blocks=num_blocks,
        invariant=invariant,
        interpret=interpret,
    )
    return out


def _exchange(
    mail: Mail,
    x_ref: Any,
    num_blocks: int,
    finish: Callable[[Any, list[tuple[Any, jax.Array]]], None],
) -> None:
    """Sends this block's rows of `x_ref`, and calls `finish` with each row and what came for it."""
    rows, columns = x_ref.shape
    words = posting.words_of(columns, x_ref.dtype, bare=mail.bare)
    of_a_turn = min(ROWS_OF_A_TURN, posting.room(bare=mail.bare) // words)
    own = schedule.share(rows, mail.block, num_blocks)
    turns = schedule.div(own + of_a_turn - 1, of_a_turn)

    def turn(number: jax.Array, _: None) -> None:
        def each(do: Callable[[Any, int], None]) -> None:
            for i in range(min(of_a_turn, schedule.ceil_div(rows, num_blocks))):
                index = number * of_a_turn + i
                pl.when(index < own)(
                    lambda i=i, index=index: do(mail.block + index * num_blocks, i * words)
                )

        def send(row: Any, word: int) -> None:
            mail.send(x_ref[row], number, word)

        def receive(row: Any, word: int) -> None:
            finish(row, mail.receive((columns,), x_ref.dtype, number, word))

        each(send)
        each(receive)

    lax.fori_loop(0, turns, turn, None)
    mail.close(turns)
