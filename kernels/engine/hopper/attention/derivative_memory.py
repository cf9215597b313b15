"""Shared memory of attention's derivative, and the barriers between those who fill and who read it.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `keys_full` | the copies into `keys` and `values` | deriving warpgroups | all | a block is there |
| `keys_done` | deriving warpgroups | loading warp | 2 | both hold the derivatives of the block |
| `queries_full[s]` | copies into a stage | deriving warpgroups | 4 | a tile of queries is there |
| `queries_empty[s]` | deriving warpgroups | loading warp | 2 | their products have read it |
| `slopes_full[p]` | deriving warpgroups | the same | 2 | both halves of the slopes are there |
| `turn[w]` | the other warpgroup | warpgroup `w` | 1 | the tensor cores are `w`'s |
| `filled[w]` | warpgroup `w` | storing warp | 1 | a piece for queries is in its buffer |
| `free[w]` | storing warp | warpgroup `w` | 1 | the copy has read it |

*Slopes* are derivatives of scores. Their slots need no barrier against being written too early: a
tile of queries is loaded once both warpgroups have finished the tile two before, in which they read
the slopes three before (`SLOTS`). After the last tile of queries of a block `slopes_full` of its
slopes completes twice more: when both warpgroups have read the block for the last time, and so that
the next block's first wait for "the slopes before" passes; what it multiplies is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.derivative_config import (
    PIECE,
    SLOTS,
    STAGES,
    WARPGROUPS,
    queries_of_tile,
)
from stretto.kernels.engine.parts import Ref
from stretto.kernels.engine.shared_memory import swizzled

COPIES_OF_QUERIES = 4
"""Queries, the result's derivatives, logsumexps and row sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What the roles of a block share.

    Attributes:
      keys: `[2 (rows), columns of 64, 64, 64]`; in the end their derivatives.
      values: `[2 (rows), 64, dim]`; likewise.
      queries, bars: `[stages, queries, dim]`, and derivatives of the result.
      lse, delta: float32 `[stages, queries]`, both negative (`DerivativeParts`).
      slopes: `[slots, rows of 64 queries, 2 (rows of keys), 64 keys, 64 queries]`.
      sums: float32 `[2, 64, 64]`, a piece of each warpgroup for the derivative of queries.

    The others are barriers.
    """

    keys: Ref
    values: Ref
    queries: Ref
    bars: Ref
    lse: Ref
    delta: Ref
    slopes: Ref
    sums: Ref
    keys_full: Ref
    keys_done: Ref
    queries_full: Ref
    queries_empty: Ref
    slopes_full: Ref
    turn: Ref
    filled: Ref
    free: Ref

    @classmethod
    def of(cls, refs: Mapping[str, Ref]) -> Memory:
        """Of the refs that `scratch` asked for."""
        return cls(**{field.name: refs[field.name] for field in dataclasses.fields(cls)})

    @property
    def columns(self) -> int:
        """Pieces of 64 that a head has."""
        return self.keys.shape[1]

    @property
    def rows(self) -> int:
        """Pieces of 64 that a tile of queries has."""
        return self.slopes.shape[1]


def scratch(dim: int, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """The memory and its barriers, by name, for `kernel.launch`."""
    stages, queries = STAGES, queries_of_tile(dim)

    def tiles(*shape: int, of: jax.typing.DTypeLike = dtype) -> Any:
        return plgpu.SMEM(shape, of, transforms=swizzled(of))

    def of_both(count: int = 1) -> Any:
        return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=count)

    keys_copies = WARPGROUPS * (dim // PIECE + 1)
    return dict(
        keys=tiles(WARPGROUPS, dim // PIECE, ROWS, PIECE),
        values=tiles(WARPGROUPS, ROWS, dim),
        queries=tiles(stages, queries, dim),
        bars=tiles(stages, queries, dim),
        lse=plgpu.SMEM((stages, queries), jnp.float32),
        delta=plgpu.SMEM((stages, queries), jnp.float32),
        slopes=tiles(SLOTS, queries // PIECE, WARPGROUPS, ROWS, PIECE),
        sums=tiles(WARPGROUPS, PIECE, PIECE, of=jnp.float32),
        keys_full=plgpu.Barrier(num_arrivals=keys_copies),
        keys_done=of_both(),
        queries_full=plgpu.Barrier(num_arrivals=COPIES_OF_QUERIES, num_barriers=stages),
        queries_empty=of_both(stages),
        slopes_full=of_both(SLOTS),
        turn=plgpu.Barrier(num_barriers=WARPGROUPS),
        filled=plgpu.Barrier(num_barriers=WARPGROUPS),
        free=plgpu.Barrier(num_barriers=WARPGROUPS),
    )
