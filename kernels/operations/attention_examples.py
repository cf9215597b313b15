"""Sizes, operands and work of `context_parallel_attention`, for tests, benchmarks and the tuner.

Tokens (`t`, `kv_t`) are those of all devices together. `masking` is the mask of a query, and how
the tokens are split: `FULL`, `ZIGZAG` or `CONTIGUOUS`, the last two under a causal mask. `passes`
is `FORWARD`, or `BOTH` where benchmarks time the derivative as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stretto.kernels.attention import layouts
from stretto.kernels.operation import Operand, Sizes
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work

SIZES = ("b", "t", "kv_t", "heads", "kv_heads", "dim", "masking", "passes")
FULL, ZIGZAG, CONTIGUOUS = 1, 2, 3
FORWARD, BOTH = 1, 2
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
        passes=FORWARD,
    )


def shapes(name: str, devices: int) -> Sequence[Sizes]:
    """2k, 8k and 32k tokens a device, with grouped heads of keys and with as many as of queries."""
    if name == "tiny":
        given = (2 * devices, devices, 16)
        return [
            _sizes(devices, 16, *given, masking=masking, passes=passes)
            for masking, passes in ((ZIGZAG, BOTH), (FULL, FORWARD), (CONTIGUOUS, FORWARD))
        ]
    if name == "goals":
        return [size for heads in HEADS for size in shapes(heads, devices)]
    if name not in HEADS:
        return []
    heads, kv_heads = HEADS[name]
    return [
        _sizes(devices, t, heads, kv_heads, 128, masking=masking, passes=passes)
        for t in TOKENS
        for masking in (ZIGZAG, FULL)
        for passes in (FORWARD, BOTH)
    ]


def _sizes(devices: int, tokens: int, heads: int, kv_heads: int, dim: int, **more: int) -> Sizes:
    t = tokens * devices
    return dict(b=1, t=t, kv_t=t, heads=heads, kv_heads=kv_heads, dim=dim, **more)


def operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """q, k and v of one device."""
    batch, dim = sizes["b"], sizes["dim"]
    keys = Operand(shape=(batch, sizes["kv_t"] // devices, sizes["kv_heads"], dim))
    return Operand(shape=(batch, sizes["t"] // devices, sizes["heads"], dim)), keys, keys


def needs(sizes: Sizes, devices: int) -> list[tuple[str, int, int]]:
    """The sizes that are divided among the devices, in zigzag a chunk from both ends."""
    parts = 2 * devices if sizes["masking"] == ZIGZAG else devices
    heads = ("heads", sizes["heads"], sizes["kv_heads"])
    return [("t", sizes["t"], parts), ("kv_t", sizes["kv_t"], parts), heads]


def keywords_of(sizes: Sizes) -> Mapping[str, Any]:
    """The keyword arguments for the mask and the layout."""
    layout = layouts.ZIGZAG if sizes["masking"] == ZIGZAG else layouts.CONTIGUOUS
    return dict(causal=sizes["masking"] != FULL, layout=layout)


def timed(sizes: Sizes, call: Callable) -> Callable:
    """The call or, by `passes`, also its derivative, with the result as the cotangent."""
    if sizes["passes"] == FORWARD:
        return call

    def both(*operands: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(call, *operands)
        return out, *pull_back(out)

    return both


def work(problem: Problem) -> Work:
    """Products for every key that a query sees, divided evenly; keys and values are sent.

    Two products forward and five backward. Backward, keys and values are sent again, and their
    derivatives.
    """
    sizes, devices = problem.sizes, problem.devices
    pairs = sizes["b"] * sizes["t"] * sizes["kv_t"] // (1 if sizes["masking"] == FULL else 2)
    both = sizes["passes"] == BOTH
    keys = 2 * sizes["b"] * sizes["kv_t"] // devices * (3 if both else 1)
    return Work(
        attention=2 * (7 if both else 2) * pairs * sizes["heads"] * sizes["dim"] // devices,
        traffic=Traffic(
            collective="all_gather",
            shape=(keys, sizes["kv_heads"] * sizes["dim"]),
            itemsize=problem.types.itemsize,
            devices=devices,
        ),
    )
