"""Kernels that add: `reduce_scatter` and `all_reduce`, by pulling pieces over NVLink.

A device loads a piece of every member's operand into shared memory, adds them up in float32 in the
order of the team, and stores the sum: on itself (reduce-scatter), on every device (all-reduce of a
large array: each device sums its part of it), or only for itself (all-reduce of a small array: each
device sums all of it, which saves a step). Every device adds in the same order, so all
devices and all runs have bitwise the same result.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `out` | its device, or every device its part | | | the sum |
| `closing` (`handshake`) | every block of every peer | block 0 | all of them | peers have read this device's operand, and `out` is in place |

Peers' operands are ready when the body starts (`handshake`).
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, residency, schedule
from stretto.distributed.team import Team
from stretto.kernels.collectives import row_layout
from stretto.kernels.collectives.row_layout import ROW_BYTES
from stretto.kernels.collectives.shared_memory import SMEM_BYTES
from stretto.kernels.problem.problem import Problem

ALL_BLOCKS = 1024  # More than any GPU has multiprocessors.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a sum is cut up.

    Attributes:
      num_blocks: blocks that add; as many as the device has multiprocessors at most.
      piece_rows: rows of 512 bytes in a piece; a multiple of 1 that 128 threads can share.
      stages: pieces of a block on their way at once, each of every member.
    """

    num_blocks: int = ALL_BLOCKS
    piece_rows: int = 16
    stages: int = 3

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the pieces fit the copy engine."""
        del problem  # Rows are counted in bytes.
        if not 1 <= self.piece_rows <= 256:
            raise ValueError(f"piece_rows={self.piece_rows} must be between 1 and 256.")
        if not 2 <= self.stages <= copies.MOST_BARRIERS:
            raise ValueError(f"stages={self.stages} must be between 2 and {copies.MOST_BARRIERS}.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for num_blocks, piece_rows, stages in (
            (ALL_BLOCKS, 8, 6),
            (ALL_BLOCKS, 32, 2),
            (64, 16, 4),
            (32, 16, 4),
        ):
            yield Config(num_blocks=num_blocks, piece_rows=piece_rows, stages=stages)

    def stages_for(self, size: int) -> int:
        """As many of the stages as fit into shared memory for a team of `size`."""
        stage = size * self.piece_rows * ROW_BYTES
        return max(2, min(self.stages, (SMEM_BYTES - self.piece_rows * ROW_BYTES) // stage))


def reduce_scatter(
    x: jax.Array, team: Team, *, op: str = "sum", config: Config = Config(), interpret: Any = None
) -> jax.Array:
    """`[size, rows, columns]` -> `[1, rows, columns]`: the sum of all parts for this device.

    Or with `op` "max" or "min" the largest or smallest of each element.
    """
    return _launch("reduce_scatter", x, team, 1, op, config, interpret, invariant=False)


def all_reduce(
    x: jax.Array, team: Team, *, op: str = "sum", config: Config = Config(), interpret: Any = None
) -> jax.Array:
    """`[parts, rows, columns]` -> the same, summed; `parts` 1 (one shot) or the team's size."""
    return _launch("all_reduce", x, team, x.shape[0], op, config, interpret, invariant=True)


def _launch(
    name: str,
    x: jax.Array,
    team: Team,
    out_parts: int,
    op: str,
    config: Config,
    interpret: Any,
    *,
    invariant: bool,
) -> jax.Array:
    """Launches a kernel of sums; each device holds `out_parts` of the result."""
    parts, rows, columns = x.shape
    piece_rows = row_layout.piece_rows(rows, config.piece_rows)
    stages = config.stages_for(team.size)
    pieces = schedule.ceil_div(rows, piece_rows)
    num_blocks = min(config.num_blocks, pieces, residency.num_multiprocessors())

    def body(x_ref, out_ref, *, buffers, arrived, sums):
        # Every device adds the same part of everybody's operand: its own, or the only one.
        part = team.device_id() if parts > 1 else 0
        sources = _members(x_ref, team, part)
        outs = [out_ref.at[part if out_parts > 1 else 0]]
        if out_parts > 1:
            outs += [
                copies.remote(out_ref, team, team.neighbour(i)).at[part] for i in team.peer_offsets
            ]
        _sum(op, sources, outs, buffers, arrived, sums, pieces, num_blocks)

    (out,) = kernel.launch(
        body,
        x,
        name=name,
        team=team,
        out_type=[jax.ShapeDtypeStruct((out_parts, rows, columns), x.dtype)],
        num_blocks=num_blocks,
        all_wait=False,
        scratch=dict(
            buffers=plgpu.SMEM((stages, team.size, piece_rows, columns), x.dtype),
            arrived=plgpu.Barrier(num_arrivals=team.size, num_barriers=stages),
            sums=plgpu.SMEM((piece_rows, columns), x.dtype),
        ),
        invariant=invariant,
        interpret=interpret,
    )
    return out


def _members(ref: Any, team: Team, part: Any) -> list[tuple[jax.Array, Any]]:
    """(member, its part of `ref`) of every member, in the order in which to read them."""
    own = [(team.device_id(), ref.at[part])]
    return own + [
        (team.neighbour(i), copies.remote(ref, team, team.neighbour(i)).at[part])
        for i in team.peer_offsets
    ]


def _sum(op, sources, outs, buffers, arrived, sums, pieces, num_blocks):
    """Adds this block's pieces up; on return the last stores are on their way."""
    stages, _, piece_rows, _ = buffers.shape
    block = kernel.block_id()
    own = schedule.share(pieces, block, num_blocks)

    def fetch(i):
        stage = schedule.rem(i, stages)
        window = pl.ds((block + i * num_blocks) * piece_rows, piece_rows)
        for member, ref in sources:
            plgpu.copy_gmem_to_smem(ref.at[window], buffers.at[stage, member], arrived.at[stage])

    for i in range(stages):
        pl.when(i < own)(lambda i=i: fetch(jnp.int32(i)))

    def step(i, _):
        stage = schedule.rem(i, stages)
        plgpu.barrier_wait(arrived.at[stage])
        total = add_up(op, [buffers[stage, member] for member in range(len(sources))])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The sum before has been read.
        sums[...] = total.astype(sums.dtype)
        plgpu.commit_smem()
        pl.when(i + stages < own)(lambda: fetch(i + stages))
        window = pl.ds((block + i * num_blocks) * piece_rows, piece_rows)
        for out in outs:
            plgpu.copy_smem_to_gmem(sums, out.at[window], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    lax.fori_loop(0, own, step, None)


def add_up(op: str, values: list[jax.Array]) -> jax.Array:
    """The sum, in float32 if the values are narrower floats, in the order given.

    Or, by `op`, the largest or smallest of each element.
    """
    add = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op]
    wide = jnp.float32 if jnp.issubdtype(values[0].dtype, jnp.floating) else values[0].dtype
    total = values[0].astype(wide)
    for value in values[1:]:
        total = add(total, value.astype(wide))
    return total
