"""Kernel of `expert_dispatch`: each device pulls the tokens that its experts want, once each.

A block walks through chunks of all devices' tokens. Of each it reads where the owner's entries go
(`positions`), fetches the tokens with an entry here into shared memory, and stores each to all of its
rows from there. Peers' operands are only read, and results are the device's own; so nothing stands
between devices but the handshake.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | its device | | | the tokens of its experts |
| `tables.arrived[slot]` | the copy engine | the block | 1 | a chunk of `positions` is there |
| `arrived[slot]` | the copy engine | the block | 1 | a token is there |
| stores of the token `stores` before | | the block | all | its slot may be filled again |
| `closing` (`handshake`) | every block of every peer | block 0 | all | this device's tokens have been read |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel
from stretto.distributed.copies import MOST_BARRIERS
from stretto.distributed.team import Team
from stretto.kernels.collectives.dispatch_block import Block
from stretto.kernels.collectives.token_tables import (
    ALIGNED_TOKENS,
    TABLE_SLOTS,
    Chunks,
    Row,
    Tables,
    check_chunk,
    everyones,
    table_bytes,
)
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import NONE
from stretto.kernels.problem.scales import FP8

SMEM_BYTES = 200_000
MOST_SMEM_BYTES = 230_000  # Of a block, tables too; barriers have the rest of 232448.
MOST_SLOTS = MOST_BARRIERS  # A barrier each.
ALL_BLOCKS = 1024  # More than any GPU has multiprocessors.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a dispatch is cut up.

    Attributes:
      num_blocks: blocks that pull; as many as the device has multiprocessors at most.
      chunk: tokens whose tables are read at once: a multiple of 8; or, of few tokens, 1, 2 or 4, so
        that more blocks have some. Fewer are where tables would leave no room for two tokens.
      slots: tokens of a block on their way at once, where they fit into shared memory. More than
        the links need only wait for each other.
      stores: tokens of a block whose stores may be unfinished when the next one's begin.
      flat: tokens and tables are loaded by flat copies (`token_tables.load`).
      tables: of few tokens `expert_dispatch` makes the tables in the kernel (`routed_dispatch`),
        whose blocks take their tokens at once: of the other fields `num_blocks` counts alone.
      counted: of many tokens it does so in another kernel (`counted_dispatch`), which has no
        chunks.
    """

    num_blocks: int = ALL_BLOCKS
    chunk: int = 64
    slots: int = 24
    stores: int = 1
    flat: bool = False
    tables: bool = False
    counted: bool = False

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        del problem
        check_chunk(self.chunk)
        if not 2 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots={self.slots} must be between 2 and {MOST_SLOTS}.")
        if not 1 <= self.stores < self.slots:
            raise ValueError(f"stores={self.stores} must be at least 1, and less than slots.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 1.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for num_blocks, slots in ((ALL_BLOCKS, 12), (64, 32), (32, 32)):
            yield Config(num_blocks=num_blocks, slots=slots)
        yield Config(flat=True)
        yield Config(stores=8)
        for slots, stores in ((8, 1), (4, 1), (16, 1), (32, 8)):
            yield Config(tables=True, counted=True, slots=slots, stores=stores)


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has: the kernel makes the tables, too.

    It is one for few tokens and for many, so that it suits those between a table's entries. On
    other than two devices XLA makes the tables of many: there the kernel was not timed.
    """
    if problem.devices == 2:
        return Config(tables=True, counted=True, slots=8, stores=1)
    return Config(tables=True)


def dispatch(
    x: jax.Array,
    positions: jax.Array,
    team: Team,
    *,
    rows: int,
    config: Config = Config(),
    interpret: Any = None,
) -> jax.Array:
    """`[tokens, d]`, int32 `[tokens, top_k]` -> `[rows, d]`; rows of no token are not written."""
    tokens, width = x.shape
    row = Row.of(width, x.dtype.itemsize)
    if row is None:
        raise ValueError(f"rows of {width} {x.dtype} cannot be copied.")  # `obstacle` says so.
    top_k = positions.shape[1]
    row_bytes = row.padded_bytes(x.dtype.itemsize)
    chunk = next(n for n in _chunks(config.chunk) if _room(n, top_k) >= 2 * row_bytes)
    chunks = Chunks.of(team, tokens, chunk, config.num_blocks, flat=config.flat)
    slots = max(2, min(config.slots, chunks.tokens, _room(chunks.tokens, top_k) // row_bytes))
    stores = min(config.stores, slots - 1)

    def body(x_ref, positions_ref, rows_ref, *, table, table_arrived, buffers, arrived):
        tables = Tables(
            chunks=chunks,
            top_k=top_k,
            sources=[everyones(positions_ref, team)],
            slots=[table],
            arrived=table_arrived,
            me=team.device_id(),
        )
        Block(
            row=row,
            stores=stores,
            tables=tables,
            sources=everyones(x_ref, team),
            rows=rows_ref,
            buffers=buffers,
            arrived=arrived,
        ).run()

    (out,) = kernel.launch(
        body,
        x.reshape(tokens, row.parts, row.columns),
        chunks.table(top_k).of_table(positions, NONE),
        name="expert_dispatch",
        team=team,
        out_type=[jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype)],
        num_blocks=chunks.num_blocks,
        all_wait=False,
        scratch=dict(
            table=chunks.scratch(top_k, jnp.int32),
            table_arrived=plgpu.Barrier(num_barriers=TABLE_SLOTS),
            buffers=plgpu.SMEM((slots, row.padded, row.columns), x.dtype),
            arrived=plgpu.Barrier(num_barriers=slots),
        ),
        interpret=interpret,
    )
    return out.reshape(rows, width)


def _chunks(most: int) -> Iterator[int]:
    """Tokens of a chunk, `most` or fewer, as `check_chunk` allows them."""
    yield most
    yield from range(most // ALIGNED_TOKENS * ALIGNED_TOKENS - ALIGNED_TOKENS, 0, -ALIGNED_TOKENS)


def _room(chunk: int, top_k: int) -> int:
    """Bytes for tokens in the shared memory of a block, beside tables of so many tokens."""
    return min(SMEM_BYTES, MOST_SMEM_BYTES - table_bytes(chunk, top_k))


def _run(operands: tuple[jax.Array, jax.Array], call: Call) -> jax.Array:
    x, positions = operands
    team = Team.along(call.axes)
    return dispatch(
        x, positions, team, rows=call.options.rows, config=call.config, interpret=call.interpret
    )


def _obstacle(problem: Problem) -> str | None:
    return obstacle(problem, ("bfloat16", "float16", "float32", *FP8))


def obstacle(problem: Problem, dtypes: tuple[str, ...]) -> str | None:
    """Why no kernel moves rows so wide, of such a type; None if one does."""
    width, itemsize = problem.sizes["d"], problem.types.itemsize
    if 0 in problem.sizes.values():
        return "the array is empty."
    if problem.types.lhs not in dtypes:
        return f"the kernel takes {', '.join(dtypes)}, not {problem.types.lhs}."
    row = Row.of(width, itemsize)
    if row is None:
        return (
            f"rows of d={width} {problem.types.lhs} are no multiple of 16 bytes, or have a large"
            " prime factor, and the kernel cannot copy them; pad d to a multiple of 64."
        )
    top_k = problem.sizes["top_k"]
    if 2 * row.padded_bytes(itemsize) > _room(ALIGNED_TOKENS, top_k):
        return (
            f"two rows of d={width} {problem.types.lhs} and tables of top_k={top_k} do not fit into"
            " the shared memory of a block."
        )
    return None


KERNEL = Kernel(
    Config=Config,
    run=_run,
    obstacle=_obstacle,
    default=default_config,
    candidates=Config.candidates,
    untried=True,
)
