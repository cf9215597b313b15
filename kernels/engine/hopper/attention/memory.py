"""Shared memory of attention, and the barriers between those who fill and who read it.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `queries_full[w]` | the copy into it | warpgroup `w` | 1 | its rows of the tile are there |
| `queries_empty[w]` | warpgroup `w` | loading warp | 1 | its products have read them |
| `keys_full[s]`, `values_full[s]` | the copy into it | attending warpgroups | 1 | a block is there |
| `keys_empty[s]`, `values_empty[s]` | attending warpgroups | loading warp | all | their products have read it |
| `turn[w]` | the warpgroup before `w`, round about | warpgroup `w` | 1 | the tensor cores are `w`'s |
| `filled[w]` | warpgroup `w` | storing warp | 1 | its result and logsumexp are in the buffers |
| `free[w]` | storing warp | warpgroup `w` | 1 | the stores have read them |

`turn` orders warpgroups for speed alone: while one multiplies, the others do their softmax.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.hopper.attention.config import ROWS, AttentionTiles
from stretto.kernels.engine.parts import Ref
from stretto.kernels.engine.shared_memory import swizzled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """Copies of one kind: `smem`, whose first index is that of `full` and `empty`."""

    smem: Ref
    full: Ref
    empty: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What the roles of a block share.

    Attributes:
      queries: `[warpgroups, rows, dim]`.
      keys, values: `[stages, tile_k, dim]`.
      turn: barriers, one a warpgroup.
      out, lse: `[warpgroups, rows, dim]` of the result's type, float32 `[warpgroups, rows]`.
      filled, free: barriers of both.
    """

    queries: Buffer
    keys: Buffer
    values: Buffer
    turn: Ref
    out: Ref
    lse: Ref
    filled: Ref
    free: Ref

    @classmethod
    def of(cls, refs: Mapping[str, Ref]) -> Memory:
        """Of the refs that `scratch` asked for."""

        def buffer(name: str) -> Buffer:
            return Buffer(
                smem=refs[f"{name}_smem"], full=refs[f"{name}_full"], empty=refs[f"{name}_empty"]
            )

        return cls(
            **{name: buffer(name) for name in ("queries", "keys", "values")},
            **{name: refs[name] for name in ("turn", "filled", "free")},
            out=refs["out_smem"],
            lse=refs["lse_smem"],
        )

    @property
    def warpgroups(self) -> int:
        """Those that attend."""
        return self.queries.smem.shape[0]

    @property
    def num_stages(self) -> int:
        """Blocks of keys and values that are loaded ahead."""
        return self.keys.smem.shape[0]

    def next(self, stage: jax.Array) -> jax.Array:
        """The stage that is filled after `stage`."""
        following = stage + 1
        return lax.select(following == self.num_stages, jnp.int32(0), following)


def scratch(config: AttentionTiles, dim: int, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """The memory and its barriers, by name, for `kernel.launch`."""
    count, stages = config.warpgroups, config.num_stages

    def tiles(number: int, rows: int) -> Any:
        return plgpu.SMEM((number, rows, dim), dtype, transforms=swizzled(dtype))

    found: dict[str, Any] = dict(
        queries_smem=tiles(count, ROWS),
        keys_smem=tiles(stages, config.tile_k),
        values_smem=tiles(stages, config.tile_k),
        out_smem=tiles(count, ROWS),
        lse_smem=plgpu.SMEM((count, ROWS), jnp.float32),
        queries_empty=plgpu.Barrier(num_barriers=count),
    )
    for name in ("queries_full", "turn", "filled", "free"):
        found[name] = plgpu.Barrier(num_barriers=count)
    for name in ("keys", "values"):
        found[f"{name}_full"] = plgpu.Barrier(num_barriers=stages)
        found[f"{name}_empty"] = plgpu.Barrier(num_arrivals=count, num_barriers=stages)
    return found
