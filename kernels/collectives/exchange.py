"""Kernels that only move data: `all_gather` and `all_to_all` push pieces over NVLink.

Each block loads pieces of its device's operand into shared memory, one after another, and stores
each of them in the results of the devices that need it, its own included. No device
waits for another before the end.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `out[d]` | device `d` | | | its part |
| `closing` (`handshake`) | peers' blocks | block 0 | all of them | all of `out` is in place |

A device may store into a peer's result as soon as its body starts, because all devices have then
started the launch (`handshake`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, residency, schedule
from stretto.distributed.team import Team
from stretto.kernels.collectives import row_layout
from stretto.kernels.collectives.row_layout import ROW_BYTES
from stretto.kernels.collectives.shared_memory import SMEM_BYTES
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a push is cut up.

    Attributes:
      num_blocks: blocks that push; a few saturate the links.
      piece_rows: rows of 512 bytes in a piece.
      slots: pieces of a block on their way at once.
    """

    num_blocks: int = 32
    piece_rows: int = 32
    slots: int = 6

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the pieces fit the copy engine and the shared memory."""
        del problem  # Rows are counted in bytes.
        if not 1 <= self.piece_rows <= 256:
            raise ValueError(f"piece_rows={self.piece_rows} must be between 1 and 256.")
        if not 2 <= self.slots <= copies.MOST_BARRIERS:
            raise ValueError(f"slots={self.slots} must be between 2 and {copies.MOST_BARRIERS}.")
        if self.slots * self.piece_rows * ROW_BYTES > SMEM_BYTES:
            raise ValueError(
                f"slots={self.slots} x piece_rows={self.piece_rows} x {ROW_BYTES} bytes must be at"
                f" most {SMEM_BYTES}: the shared memory of a block."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for num_blocks, piece_rows in ((16, 64), (32, 64), (64, 32), (16, 32), (24, 32)):
            yield Config(num_blocks=num_blocks, piece_rows=piece_rows)


def all_gather(
    x: jax.Array,
    team: Team,
    *,
    config: Config = Config(),
    invariant: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """`[1, rows, columns]` -> `[size, rows, columns]`: everybody's, in the order of the team.

    With `invariant` the result is typed as not varying over the team's axes.
    """

    def routes(x_ref, out_ref):
        own = out_ref.at[team.device_id()]
        peers = [
            copies.remote(out_ref, team, team.neighbour(i)).at[team.device_id()]
            for i in team.peer_offsets
        ]
        return [x_ref.at[0]], [[*peers, own]]

    return _push("all_gather", x, team, routes, config, interpret, invariant)


def all_to_all(
    x: jax.Array, team: Team, *, config: Config = Config(), interpret: Any = None
) -> jax.Array:
    """`[size, rows, columns]` -> the same: part `i` is sent to `i`, part `d` comes from `d`."""

    def routes(x_ref, out_ref):
        offsets = [*team.peer_offsets, 0]
        sources = [x_ref.at[team.neighbour(i)] for i in offsets]
        results = [
            copies.remote(out_ref, team, team.neighbour(i)) if i else out_ref for i in offsets
        ]
        return sources, [[ref.at[team.device_id()]] for ref in results]

    return _push("all_to_all", x, team, routes, config, interpret)


def _push(
    name: str,
    x: jax.Array,
    team: Team,
    routes: Callable[[Any, Any], tuple[list[Any], list[list[Any]]]],
    config: Config,
    interpret: Any,
    invariant: bool = False,
) -> jax.Array:
    """Launches a kernel of pushes; `routes` gives the sources and their destinations."""
    sources, rows, columns = x.shape
    piece_rows = row_layout.piece_rows(rows, config.piece_rows)
    pieces = sources * schedule.ceil_div(rows, piece_rows)
    num_blocks = min(config.num_blocks, pieces, residency.num_multiprocessors())

    def body(x_ref, out_ref, *, buffers, arrived):
        from_refs, to_refs = routes(x_ref, out_ref)
        copies.Push(
            sources=from_refs,
            destinations=to_refs,
            buffers=buffers,
            barriers=arrived,
            num_blocks=num_blocks,
        ).run(kernel.block_id())

    (out,) = kernel.launch(
        body,
        x,
        name=name,
        team=team,
        out_type=[jax.ShapeDtypeStruct((team.size, rows, columns), x.dtype)],
        num_blocks=num_blocks,
        all_wait=False,
        scratch=dict(
            buffers=plgpu.SMEM((config.slots, piece_rows, columns), x.dtype),
            arrived=plgpu.Barrier(num_barriers=config.slots),
        ),
        invariant=invariant,
        interpret=interpret,
    )
    return out
