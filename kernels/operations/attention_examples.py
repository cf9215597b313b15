"""Sizes, operands and work of `context_parallel_attention`, for tests, benchmarks and the tuner.

Tokens (`t`, `kv_t`) are those of all devices together. `masking` says what a query sees, and how
the tokens are split: `FULL`, `ZIGZAG` or `CONTIGUOUS`, the last two under a causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.kernels.attention import layouts
from stretto.kernels.operation import Operand, Sizes
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work

SIZES = ("b", "t", "kv_t", "heads", "kv_heads", "dim", "masking")
FULL, ZIGZAG, CONTIGUOUS = 1, 2, 3
HEADS = {"gqa": (64, 8), "mha": (32, 32)}
TOKENS = (2048, 8192, 32768)  # of a device
SETS = ("tiny", "goals", *HEADS)


def sizes_of(q: Any, k: Any, devices: int, *, causal: bool, layout: str) -> dict[str, int]:
    """The sizes of a call."""
    batch, tokens, heads, dim = q.shape
    masking = ZIGZAG if layout == layouts.ZIGZAG else CONTIGUOUS
    return dict(
        b=batch,
        t=devices * tokens,
        kv_t=devices * k.shape[1],
        heads=heads,
        kv_heads=k.shape[2],
        dim=dim,
        masking=masking if causal else FULL,
    )


def shapes(name: str, devices: int) -> Sequence[Sizes]:
    """2k, 8k and 32k tokens a device, of grouped heads and of as many of keys."""
    if name == "tiny":
        tokens = 16 * devices
        return [
            dict(b=1, t=tokens, kv_t=tokens, heads=2 * devices, kv_heads=devices, dim=16, masking=m)
            for m in (ZIGZAG, FULL, CONTIGUOUS)
        ]
    if name == "goals":
        return [size for heads in HEADS for size in shapes(heads, devices)]
    if name not in HEADS:
        return []
    heads, kv_heads = HEADS[name]
    return [
        dict(
            b=1,
            t=t * devices,
            kv_t=t * devices,
            heads=heads,
            kv_heads=kv_heads,
            dim=128,
            masking=masking,
        )
        for t in TOKENS
        for masking in (ZIGZAG, FULL)
    ]


def operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """q, k and v of one device."""
    batch, dim = sizes["b"], sizes["dim"]
    keys = Operand(shape=(batch, sizes["kv_t"] // devices, sizes["kv_heads"], dim))
    return Operand(shape=(batch, sizes["t"] // devices, sizes["heads"], dim)), keys, keys


def needs(sizes: Sizes, devices: int) -> list[tuple[str, int, int]]:
    """What the devices share out, in zigzag a chunk from both ends."""
    parts = 2 * devices if sizes["masking"] == ZIGZAG else devices
    heads = ("heads", sizes["heads"], sizes["kv_heads"])
    return [("t", sizes["t"], parts), ("kv_t", sizes["kv_t"], parts), heads]


def keywords_of(sizes: Sizes) -> Mapping[str, Any]:
    """What the public function is told of the mask and the layout."""
    layout = layouts.ZIGZAG if sizes["masking"] == ZIGZAG else layouts.CONTIGUOUS
    return dict(causal=sizes["masking"] != FULL, layout=layout)


def work(problem: Problem) -> Work:
    """Two products for every key that a query sees, shared out evenly; keys and values cross."""
    sizes, devices = problem.sizes, problem.devices
    pairs = sizes["b"] * sizes["t"] * sizes["kv_t"] // (1 if sizes["masking"] == FULL else 2)
    keys = 2 * sizes["b"] * sizes["kv_t"] // devices
    return Work(
        attention=4 * pairs * sizes["heads"] * sizes["dim"] // devices,
        traffic=Traffic(
            collective="all_gather",
            shape=(keys, sizes["kv_heads"] * sizes["dim"]),
            itemsize=problem.types.itemsize,
            devices=devices,
        ),
    )
