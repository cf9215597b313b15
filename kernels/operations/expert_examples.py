"""Sizes, operands and work of the operations on experts, for tests, benchmarks and the tuner.

Tokens (`t`) and rows are those of all devices together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stretto.kernels.operation import Operand, Sizes
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import Routing
from stretto.kernels.problem.work import Traffic, Work

# Layers of published models: width, width of an expert, experts, choices of a token.
MODELS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
    "gpt-oss": (2880, 2880, 128, 4),
}
TOKENS = (1, 64, 1024, 16384, 8192)  # of a device; the last one is that of the goals
SETS = ("tiny", "goals", *MODELS)


def models(name: str, devices: int) -> Sequence[Sizes]:
    """Layers: `t`, `d`, `f`, `top_k` and `num_experts`."""
    if name == "tiny":
        return [dict(t=16 * devices, d=128, f=64, top_k=2, num_experts=2 * devices)]
    if name == "goals":
        return [size for model in MODELS for size in models(model, devices)[-1:]]
    if name not in MODELS:
        return []
    d, f, experts, top_k = MODELS[name]
    if experts % devices:
        return []
    return [dict(t=t * devices, d=d, f=f, top_k=top_k, num_experts=experts) for t in TOKENS]


def dispatch_shapes(name: str, devices: int) -> Sequence[Sizes]:
    """`t`, `d`, `top_k` and `num_experts`."""
    return [_some(sizes, "t", "d", "top_k", "num_experts") for sizes in models(name, devices)]


def combine_shapes(name: str, devices: int) -> Sequence[Sizes]:
    """`t`, `d`, `top_k` and `rows`, as many as there are choices."""
    return [
        dict(_some(sizes, "t", "d", "top_k"), rows=sizes["t"] * sizes["top_k"])
        for sizes in models(name, devices)
    ]


def _some(sizes: Sizes, *names: str) -> Sizes:
    return {name: sizes[name] for name in names}


def needs(sizes: Sizes, devices: int) -> list[tuple[str, int, int]]:
    """The sizes that are divided among the devices."""
    return [(name, sizes[name], devices) for name in ("t", "rows", "num_experts") if name in sizes]


def dispatch_operands(sizes: Sizes, devices: int, skew: float = 0.0) -> tuple[Operand, ...]:
    """Tokens, and different experts for each; equally likely experts without a `skew`."""
    tokens = sizes["t"] // devices
    shape = tokens, sizes["top_k"]
    draw = functools.partial(chosen, shape=shape, num_experts=sizes["num_experts"], skew=skew)
    return Operand(shape=(tokens, sizes["d"])), Operand(shape=shape, dtype="int32", draw=draw)


def routed_rows(results: tuple[jax.Array, Routing]) -> tuple[jax.Array, Routing]:
    """The results of `expert_dispatch`, with zeros in the undefined rows."""
    rows, routing = results
    is_routed = jnp.arange(rows.shape[0]) < routing.group_sizes.sum()
    return jnp.where(is_routed[:, None], rows, jnp.zeros((), rows.dtype)), routing


def combine_operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """Rows, weights, and positions in random order, each once."""
    tokens, rows = sizes["t"] // devices, sizes["rows"] // devices
    shape = tokens, sizes["top_k"]
    draw = functools.partial(_places, shape=shape, places=rows * devices)
    return (
        Operand(shape=(rows, sizes["d"])),
        Operand(shape=shape, dtype="float32"),
        Operand(shape=shape, dtype="int32", draw=draw),
    )


def chosen(
    key: jax.Array, *, shape: tuple[int, int], num_experts: int, skew: float = 0.0
) -> jax.Array:
    """Different experts for each token; expert `i` has a weight of `1 / (i + 1)^skew`."""
    tokens, top_k = shape
    likely = -skew * jnp.log(jnp.arange(1.0, num_experts + 1))
    scores = likely + jax.random.gumbel(key, (tokens, num_experts))
    return jax.lax.top_k(scores, min(top_k, num_experts))[1].astype(jnp.int32)


def _places(key: jax.Array, *, shape: tuple[int, int], places: int) -> jax.Array:
    count = shape[0] * shape[1]
    drawn = jax.random.permutation(key, jnp.arange(max(count, places), dtype=jnp.int32))
    return (drawn[:count] % places).reshape(shape)


def dispatched(problem: Problem) -> Work:
    """Each arriving token is read once, and each of its rows is written."""
    return dataclasses.replace(moved(problem), memory_bytes=_bytes(problem, _reached(problem)))


def combined(problem: Problem) -> Work:
    """Each row is read, and each of the own tokens is written."""
    own = problem.sizes["t"] // problem.devices
    return dataclasses.replace(moved(problem), memory_bytes=_bytes(problem, own))


def _bytes(problem: Problem, tokens: float) -> float:
    """The bytes of so many tokens, and of the rows of a device where all have equally many."""
    rows = problem.sizes["t"] * problem.sizes["top_k"] / problem.devices
    return (tokens + rows) * problem.sizes["d"] * problem.types.itemsize


def _reached(problem: Problem) -> float:
    """Tokens that choose an expert of one device, where all experts are equally likely.

    A token's experts differ, and so they are drawn as `dispatch_operands` does. The rows that
    `combine_operands` draws are so many that each is on any device.
    """
    sizes, devices = problem.sizes, problem.devices
    if "num_experts" not in sizes:
        return sizes["t"] * (1 - (1 - 1 / devices) ** sizes["top_k"])
    experts = sizes["num_experts"]
    top_k, others = min(sizes["top_k"], experts), experts - experts // devices
    return sizes["t"] * (1 - math.comb(others, top_k) / math.comb(experts, top_k))


def moved(problem: Problem) -> Work:
    """Each token is sent once to every device with one of its experts, which are equally likely."""
    return Work(
        traffic=Traffic(
            collective="all_to_all",
            shape=(round(_reached(problem)), problem.sizes["d"]),
            itemsize=problem.types.itemsize,
            devices=problem.devices,
        )
    )


def layer(problem: Problem) -> Work:
    """The products of the dispatched rows, and the traffic of dispatch and combine."""
    sizes, devices = problem.sizes, problem.devices
    traffic = moved(problem).traffic
    if traffic is not None:
        rows, width = traffic.shape
        traffic = dataclasses.replace(traffic, shape=(2 * rows, width))
    rows = sizes["t"] * sizes["top_k"] // devices
    matrices = max(1, sizes["num_experts"] // devices)
    return Work(
        product=(rows, sizes["d"], sizes["n"] + sizes["f"]), matrices=matrices, traffic=traffic
    )


def layer_shapes(name: str, devices: int) -> Sequence[Sizes]:
    """`t`, `d`, `n` columns of w_in, `f`, `top_k` and `num_experts`."""
    return [
        dict(_some(sizes, "t", "d"), n=2 * sizes["f"], **_some(sizes, "f", "top_k", "num_experts"))
        for sizes in models(name, devices)
    ]


def layer_operands(sizes: Sizes, devices: int, skew: float = 0.0) -> tuple[Operand, ...]:
    """Tokens, their experts, weights, and gated experts."""
    x, index = dispatch_operands(sizes, devices, skew)
    experts, d = sizes["num_experts"] // devices, sizes["d"]
    return (
        x,
        index,
        Operand(shape=index.shape, dtype="float32"),
        Operand(shape=(experts, d, sizes["n"])),
        Operand(shape=(experts, sizes["f"], d)),
    )


ZIPF = 1.0  # As of words: expert `i` is chosen `1 / i` times as often as the first.
DISPATCHES = {"zipf": functools.partial(dispatch_operands, skew=ZIPF)}
LAYERS = {"zipf": functools.partial(layer_operands, skew=ZIPF)}
