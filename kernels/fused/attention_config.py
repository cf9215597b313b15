"""How the attention that pulls keys is cut up, and what it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int, div, rem
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.hopper.attention.config import (
    DEEP,
    DIMS,
    LARGE,
    ROWS,
    TALL,
    AttentionTiles,
)
from stretto.kernels.engine.parts import Tile
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.fused.obstacles import check_pull_slots
from stretto.kernels.problem.problem import Problem

TYPES = ("bfloat16", "float16")
BACKWARD = CUDNN, KERNEL = "cudnn", "kernel"
PALLAS_BYTES = 2048
"""Of shared memory that Pallas takes besides: for reductions, and for the start of each buffer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up.

    Attributes:
      tiles: of attention.
      pull_rows: keys, or values, of a head that the pulling warp fetches at once.
      pull_slots: such pieces on their way at once, per block.
      keep: the peers' keys and values are kept for the backward pass, in place of gathering them
        again.
      backward: what derives: the "kernel" of `attention_derivative`, or "cudnn", or `jax.lax` where
        that does not support a call. Where the kernel does not take a call, it is one of these two.
    """

    tiles: AttentionTiles = LARGE
    pull_rows: int = 32
    pull_slots: int = 3
    keep: bool = True
    backward: str = KERNEL

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        self.tiles.check()
        check_pull_slots(self.pull_slots)
        if self.backward not in BACKWARD:
            raise ValueError(f"backward={self.backward!r} must be one of {', '.join(BACKWARD)}.")
        if self.pull_rows < 1 or self.tiles.tile_k % self.pull_rows:
            raise ValueError(
                f"pull_rows={self.pull_rows} must divide tile_k={self.tiles.tile_k}, of which"
                " chunks of keys are multiples."
            )
        if problem is not None:
            self.check_heads(problem.sizes["dim"], problem.types.itemsize)

    def check_heads(self, dim: int, itemsize: int) -> None:
        """Raises ValueError unless a block has registers and memory for heads of this size."""
        if self.tiles.warpgroups > 2 and dim > min(DIMS):
            raise ValueError(
                f"warpgroups={self.tiles.warpgroups} do not have the registers for heads of"
                f" dim={dim}; pass warpgroups=2."
            )
        needed = self.tiles.smem_bytes(dim, itemsize) + PALLAS_BYTES
        needed += self.pull_slots * self.pull_rows * dim * itemsize
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has {SMEM_BYTES};"
                " take fewer stages or slots."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, for one problem or for all; likely ones first."""
        for dim in DIMS if problem is None else (problem.sizes["dim"],):
            if dim > min(DIMS):
                yield Config()
                yield Config(pull_rows=16, pull_slots=6)
            else:
                yield Config(tiles=DEEP)
                yield Config(tiles=TALL)


def config_for(dim: int) -> Config:
    """The default for heads of this size, as measured on one and two H200s."""
    return Config(tiles=DEEP if dim <= min(DIMS) else LARGE)


class Sequence(NamedTuple):
    """How a device's tokens lie in the sequence, and what they see.

    Attributes:
      chunks: of a device: 1, or 2 in zigzag.
      causal, window: as `VisibleKeys` has them.
    """

    chunks: int = 1
    causal: bool = False
    window: int | None = None

    def visible(
        self, queries: int, keys: int, devices: int, *, rows: int, block: int
    ) -> VisibleKeys:
        """Which of so many keys a device's queries see on the first device.

        Tiles have `rows` queries, and blocks `block` keys.
        """
        return VisibleKeys(
            device=0,
            devices=devices,
            chunks=self.chunks,
            queries=queries // self.chunks,
            keys=keys // self.chunks,
            rows=rows,
            block=block,
            causal=self.causal,
            window=self.window,
        )


def obstacle(
    q: jax.ShapeDtypeStruct | jax.Array, kv_tokens: int, chunks: int, tiles: AttentionTiles
) -> str | None:
    """Why the kernel cannot attend with q, `[batch, tokens, heads, dim]`; None if it can."""
    tokens = (q.shape[1], ROWS)
    return not_taken(q) or not_whole(chunks, tokens=tokens, kv_tokens=(kv_tokens, tiles.tile_k))


def not_taken(q: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why kernels of attention take no operands of q's type and head size; None if they do."""
    if str(q.dtype) not in TYPES:
        return f"the kernel takes {' and '.join(TYPES)}, not {q.dtype}."
    if q.shape[3] not in DIMS:
        return f"the kernel takes heads of size {' and '.join(map(str, DIMS))}, not {q.shape[3]}."
    return None


def not_whole(chunks: int, **counts: tuple[int, int]) -> str | None:
    """Why (tokens of a device, multiple of a chunk) do not fill tiles, by name; None if they do."""
    for name, (count, multiple) in counts.items():
        if count % (chunks * multiple):
            return (
                f"{name}={count} of a device must be a multiple of {chunks * multiple},"
                f" {multiple} for each of its chunks; pad the sequence."
            )
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call: its sizes, as the parts of the kernel use them.

    Attributes:
      config: of the kernel.
      batch, chunks: sequences, and chunks of each on a device.
      heads, kv_heads, dim: of queries, of keys, size of each.
      visible: which keys tiles see, on the first device.
    """

    config: Config
    batch: int
    chunks: int
    heads: int
    kv_heads: int
    dim: int
    visible: VisibleKeys

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, devices: int, sequence: Sequence, config: Config
    ) -> Sizes:
        """Of a call with these operands on so many devices."""
        batch, tokens, heads, dim = q.shape
        visible = sequence.visible(
            tokens, k.shape[1], devices, rows=config.tiles.tile_m, block=config.tiles.tile_k
        )
        return cls(
            config=config,
            batch=batch,
            chunks=sequence.chunks,
            heads=heads,
            kv_heads=k.shape[2],
            dim=dim,
            visible=visible,
        )

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.heads // self.kv_heads

    @property
    def peers(self) -> int:
        """The other devices."""
        return self.visible.devices - 1

    @property
    def pieces_of_chunk(self) -> int:
        """Pieces of a head's keys and values of a chunk."""
        return 2 * self.visible.keys // self.config.pull_rows

    @property
    def is_uneven(self) -> bool:
        """Whether tiles take so different times that a table shares them out (`even_shares`)."""
        return self.visible.causal and self.visible.window is None

    @property
    def num_tiles(self) -> int:
        """Tiles of queries."""
        return self.batch * self.heads * self.chunks * self.visible.tiles_of_chunk

    def columns(self, head: Int) -> pl.Slice:
        """The columns of a head."""
        return pl.ds(head * self.dim, self.dim)

    def kv_head(self, tile: Tile) -> Int:
        """The head of keys of a tile's queries."""
        return div(tile.n, self.group)

    def chunk(self, tile: Tile, segment: Int) -> Int:
        """The chunk of keys of a segment for a tile, among those of all sequences of its device."""
        return tile.step - rem(tile.step, self.chunks) + self.visible.chunk(segment)
