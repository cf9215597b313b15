"""Transfers: what the spare warps of all blocks move, piece by piece, while others multiply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, schedule
from stretto.distributed.schedule import Int
from stretto.distributed.team import Team
from stretto.kernels.engine.parts import Ref


class Scratch(Protocol):
    """The shared memory of a transfer."""

    def scratch(self) -> dict[str, Any]:
        """Memory and barriers, by name, for `kernel.launch`."""
        ...


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Shared memory that a transfer's pieces pass through: `count` buffers of a piece each.

    They are scratch by the name `name`, and their barriers by that with `_full` after it.
    """

    count: int
    rows: int
    columns: int
    dtype: jax.typing.DTypeLike
    name: str = "pulled"

    def scratch(self) -> dict[str, Any]:
        """The buffers and their barriers, by name, for `kernel.launch`."""
        return {
            self.name: plgpu.SMEM((self.count, self.rows, self.columns), self.dtype),
            f"{self.name}_full": plgpu.Barrier(num_barriers=self.count),
        }


class Fetch(Protocol):
    """Which pieces of the peers' arrays all blocks fetch together, and from where to where."""

    @property
    def num_pieces(self) -> Int:
        """Of all blocks; perhaps known in the kernel only."""
        ...

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a piece."""
        ...

    def place(self, index: Int, /) -> copies.Place:
        """The place of the piece at `index`, in the order in which the matmul needs them."""
        ...

    def sources(self, ref: Ref, /) -> Sequence[Ref]:
        """The source arrays of pieces, `ref` here and on the peers, for `copies.Pull`."""
        ...

    def destination(self, gathered: Ref, source: Int, /) -> Ref:
        """The destination of the pieces of a source."""
        ...


def pull(
    fetch: Fetch,
    ref: Ref,
    gathered: Ref,
    *,
    arrived: Callable[[copies.Place], None],
    buffers: Ref,
    barriers: Ref,
    num_blocks: int,
) -> None:
    """Fetches this block's share of the pieces; all are in place, and `arrived` called, on return.

    The blocks take pieces in turn, so that pieces arrive in the order in which they are needed.
    """
    block = kernel.block_id()
    copies.Pull(
        pieces=schedule.share(fetch.num_pieces, block, num_blocks),
        place=lambda i: fetch.place(block + i * num_blocks),
        sources=fetch.sources(ref),
        destination=lambda source: fetch.destination(gathered, source),
        arrived=arrived,
        buffers=buffers,
        barriers=barriers,
    ).run()


def on_peers(ref: Ref, team: Team) -> list[Ref]:
    """`ref` as each of the peers holds it, in the order of `team.peer_offsets`."""
    peers = (team.neighbour(offset) for offset in team.peer_offsets)
    return [copies.remote(ref, team, peer) for peer in peers]
