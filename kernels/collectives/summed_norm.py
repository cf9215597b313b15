"""The kernel of `all_reduce_rms_norm`: rows are summed over NVLink, added to, normalised, stored.

A block takes a row at a time: it loads every member's row and the residual's into shared memory,
adds them up in float32 in the order of the team, rounds once to the new residual, and normalises
what it rounded. In one shot each device does all rows for itself. In two, device `d` does the rows
`d`, `d + D`, ... and stores both results on every device.

Two shots read `(D - 1) / D` of the rows and store `2 (D - 1) / D`, since there are two results; one
shot reads `D - 1`. So two devices never take two shots, and several do where bytes and not the
closing count.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| both results | their device, or every device its rows | | | the sum and its norm |
| `closing` (`handshake`) | every block of every peer | block 0 | all of them | peers have read this device's rows, and the results are in place |

Peers' operands are ready when the body starts (`handshake`).
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, residency, schedule
from stretto.distributed.team import Team
from stretto.kernels.collectives.shared_memory import SMEM_BYTES
from stretto.kernels.problem.problem import Problem

COLUMNS = 256
"""Elements of a piece of a row: the most that the copy engine moves at once."""
MOST_PIECES = 256
STEP = 4
"""Pieces that are added at once, at most: eight elements of each thread."""
SMALL_BYTES = 4 * (STEP * COLUMNS + 64)  # Where threads add their sums of squares.
ONE_SHOT_BYTES = 256 * 1024
"""Up to which several devices take one shot; not measured, it is the all-reduce's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How rows are shared out.

    Attributes:
      num_blocks: blocks that process rows; with a sixteenth of multiprocessors free, devices start
        without XLA's barrier.
      stages: rows of a block on their way at once, each of every member.
    """

    num_blocks: int = 120
    stages: int = 3

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless there are blocks and stages."""
        del problem
        for name in ("num_blocks", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for num_blocks, stages in ((120, 2), (120, 4), (64, 3), (1024, 2)):
            yield Config(num_blocks=num_blocks, stages=stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rooms:
    """What fits into shared memory: rows on their way, and rows that are being stored."""

    stages: int
    stores: int

    @classmethod
    def of(cls, devices: int, n: int, itemsizes: tuple[int, int], stages: int) -> Rooms | None:
        """The most that fits, `stages` rows on their way at most; None where not even one does.

        Args:
          devices: the team's size.
          n: elements of a row.
          itemsizes: bytes of an element of the summed rows, and of the residual.
          stages: how many are wanted.
        """
        stage, store = n * (devices * itemsizes[0] + itemsizes[1]), n * sum(itemsizes)
        weight = 4 * n
        for wanted, stores in ((stages, 2), (2, 2), (1, 2), (1, 1)):
            for count in range(min(wanted, stages), 0, -1):
                if count * stage + stores * store + weight + SMALL_BYTES <= SMEM_BYTES:
                    return cls(stages=count, stores=stores)
        return None


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
    itemsizes = x.dtype.itemsize, residual.dtype.itemsize
    rooms = Rooms.of(team.size, n, itemsizes, config.stages)
    if rooms is None:
        raise ValueError(f"n={n} does not fit into shared memory for {team.size} devices.")
    one_shot = team.size == 2 or x.nbytes <= ONE_SHOT_BYTES
    pieces = n // COLUMNS
    most_rows = m if one_shot else schedule.ceil_div(m, team.size)
    num_blocks = min(config.num_blocks, most_rows, residency.num_multiprocessors())

    def body(x_ref, residual_ref, weight_ref, total_ref, out_ref, **scratch):
        results = [[total_ref], [out_ref]]
        if not one_shot:
            for refs in results:
                refs += [copies.remote(refs[0], team, team.neighbour(i)) for i in team.peer_offsets]
        first, step = (0, 1) if one_shot else (team.device_id(), team.size)
        _Rows(
            sources=_members(x_ref, team),
            residual=residual_ref,
            results=results,
            epsilon=epsilon,
            **scratch,
        ).run(weight_ref, m, first, step, num_blocks)

    total, out = kernel.launch(
        body,
        x.reshape(m, pieces, COLUMNS),
        residual.reshape(m, pieces, COLUMNS),
        weight.reshape(pieces, COLUMNS),
        name="all_reduce_rms_norm",
        team=team,
        out_type=[
            jax.ShapeDtypeStruct((m, pieces, COLUMNS), residual.dtype),
            jax.ShapeDtypeStruct((m, pieces, COLUMNS), x.dtype),
        ],
        num_blocks=num_blocks,
        all_wait=False,
        scratch=dict(
            rows=plgpu.SMEM((rooms.stages, team.size, pieces, COLUMNS), x.dtype),
            residuals=plgpu.SMEM((rooms.stages, pieces, COLUMNS), residual.dtype),
            arrived=plgpu.Barrier(num_arrivals=team.size + 1, num_barriers=rooms.stages),
            weights=plgpu.SMEM((pieces, COLUMNS), weight.dtype),
            weight_arrived=plgpu.Barrier(),
            totals=plgpu.SMEM((rooms.stores, pieces, COLUMNS), residual.dtype),
            normed=plgpu.SMEM((rooms.stores, pieces, COLUMNS), x.dtype),
            squares=plgpu.SMEM((math.gcd(pieces, STEP), COLUMNS), jnp.float32),
            square=plgpu.SMEM((64,), jnp.float32),
        ),
        invariant=True,
        interpret=interpret,
    )
    return total.reshape(m, n), out.reshape(m, n)


def _members(ref: Any, team: Team) -> list[tuple[Any, Any]]:
    """(member, its `ref`) of every member, in the order in which to read them."""
    peers = [team.neighbour(offset) for offset in team.peer_offsets]
    return [(team.device_id(), ref)] + [(peer, copies.remote(ref, team, peer)) for peer in peers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """A block's rows, one after another, by one warpgroup.

    Attributes:
      sources: (member, its rows).
      residual: this device's.
      results: refs of new residuals, and of normalised rows, here first and then on peers.
      epsilon: added to the mean square.
      The others are shared memory and barriers, as `all_reduce_rms_norm` lays them out.
    """

    sources: Sequence[tuple[Any, Any]]
    residual: Any
    results: Sequence[Sequence[Any]]
    epsilon: float
    rows: Any
    residuals: Any
    arrived: Any
    weights: Any
    weight_arrived: Any
    totals: Any
    normed: Any
    squares: Any
    square: Any

    def run(self, weight: Any, m: int, first: Any, step: int, num_blocks: int) -> None:
        """Does rows `first`, `first + step`, ... below `m`, of which each block has its share.

        On return the last stores are on their way.
        """
        block, stages = kernel.block_id(), self.rows.shape[0]
        own = schedule.share(schedule.div(m - first + step - 1, step), block, num_blocks)

        def row(i):
            return first + (block + i * num_blocks) * step

        @pl.when(own > 0)
        def _():
            plgpu.copy_gmem_to_smem(weight, self.weights, self.weight_arrived)

        for i in range(stages):
            pl.when(i < own)(lambda i=i: self._fetch(jnp.int32(i), row(i)))

        @pl.when(own > 0)
        def _():
            plgpu.barrier_wait(self.weight_arrived)

        def one(i, _):
            stage, store = schedule.rem(i, stages), schedule.rem(i, self.totals.shape[0])
            plgpu.barrier_wait(self.arrived.at[stage])
            # The stores of the row whose room this one takes have been read.
            plgpu.wait_smem_to_gmem(self.totals.shape[0] - 1, wait_read_only=True)
            self.squares[...] = self._add(stage, store)
            plgpu.commit_smem()
            pl.when(i + stages < own)(lambda: self._fetch(i + stages, row(i + stages)))
            self._normalise(store)
            plgpu.commit_smem()
            for source, refs in zip((self.totals, self.normed), self.results, strict=True):
                for ref in refs:
                    plgpu.copy_smem_to_gmem(source.at[store], ref.at[row(i)], commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        lax.fori_loop(0, own, one, None)

    def _fetch(self, i: jax.Array, row: Any) -> None:
        stage = schedule.rem(i, self.rows.shape[0])
        for member, ref in self.sources:
            plgpu.copy_gmem_to_smem(
                ref.at[row], self.rows.at[stage, member], self.arrived.at[stage]
            )
        plgpu.copy_gmem_to_smem(
            self.residual.at[row], self.residuals.at[stage], self.arrived.at[stage]
        )

    def _windows(self) -> list[Any]:
        """The pieces of a row, a few at a time."""
        step = self.squares.shape[0]
        return [pl.ds(at, step) for at in range(0, self.weights.shape[0], step)]

    def _add(self, stage: Any, store: Any) -> jax.Array:
        """Makes a new residual; returns the sums of its squares, by element of a window."""
        squares = jnp.zeros(self.squares.shape, jnp.float32)
        for window in self._windows():
            total = self.rows[stage, 0, window].astype(jnp.float32)
            for member in range(1, len(self.sources)):
                total = total + self.rows[stage, member, window].astype(jnp.float32)
            total = total + self.residuals[stage, window].astype(jnp.float32)
            rounded = total.astype(self.totals.dtype)
            self.totals[store, window] = rounded
            rounded = rounded.astype(jnp.float32)
            squares = squares + rounded * rounded
        return squares

    def _normalise(self, store: Any) -> None:
        """Makes a row of the result out of the new residual, once all squares are in place."""
        elements = self.weights.shape[0] * COLUMNS
        scale = lax.rsqrt(self._sum_of_squares() / elements + self.epsilon)
        for window in self._windows():
            row = self.totals[store, window].astype(jnp.float32) * scale
            row = row * self.weights[window].astype(jnp.float32)
            self.normed[store, window] = row.astype(self.normed.dtype)

    def _sum_of_squares(self) -> jax.Array:
        """The sum of `squares`, over all threads.

        Along a row of a tensor core's layout four threads add by themselves. So every row of a
        matrix gets the same 128 numbers, and each of its sums is the sum of all.
        """
        count, columns = self.squares.shape
        layout = plgpu.Layout.WGMMA
        parts = [
            plgpu.load(self.squares.at[row, pl.ds(at, 128)], layout=layout.reduce(0))
            for row in range(count)
            for at in range(0, columns, 128)
        ]
        matrix = lax.broadcast_in_dim(sum(parts[1:], parts[0]), (64, 128), (1,))
        self.square[...] = jnp.sum(matrix, axis=1)
        plgpu.commit_smem()
        return self.square[0]
