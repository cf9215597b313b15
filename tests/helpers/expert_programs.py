"""Calls of experts at the sizes of models, to be compiled, and what XLA runs beside kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

import stretto as st
from stretto.kernels.problem.routing import Routing

SIZES = {  # d, f, experts, top_k
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
}
FREE = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "custom-call"}
"""Of a program's operations those that are no kernel of XLA's."""
type Shapes = list[tuple[tuple[int, ...], Any]]


def calls(model: str, tokens: int) -> Iterator[tuple[str, Callable, Shapes]]:
    """A dispatch and a combine on two devices, of the operands of each."""
    d, _, experts, top_k = SIZES[model]
    x, index = ((tokens, d), jnp.bfloat16), ((tokens, top_k), jnp.int32)

    def dispatched(x, index):
        rows, routing = st.expert_dispatch(x, index, "x", num_experts=experts, backend="pallas")
        return rows, *_used(routing)

    def combined(rows, weights, positions):
        return st.expert_combine(rows, weights, positions, "x", backend="pallas")

    rows = (2 * tokens * top_k, d), jnp.bfloat16
    yield "dispatch", dispatched, [x, index]
    yield "combine", combined, [rows, ((tokens, top_k), jnp.float32), index]


def layer(model: str, tokens: int) -> Iterator[tuple[str, Callable, Shapes]]:
    """A layer of gated experts on two devices."""
    d, f, experts, top_k = SIZES[model]

    def called(*operands):
        out, routing = st.mixture_of_experts(*operands, "x", backend="pallas")
        return out, *_used(routing)

    shapes = [
        ((tokens, d), jnp.bfloat16),
        ((tokens, top_k), jnp.int32),
        ((tokens, top_k), jnp.float32),
        ((experts // 2, d, 2 * f), jnp.bfloat16),
        ((experts // 2, f, d), jnp.bfloat16),
    ]
    yield "layer", called, shapes


def _used(routing: Routing) -> list:
    """All but the number of dropped rows, a constant, which a program would copy to return it."""
    return [x for name, x in routing._asdict().items() if name != "dropped"]


def beside_kernels(hlo: str) -> Counter:
    """The operations for which XLA launches something, by name, of a program's optimised HLO."""
    kernels = {
        name
        for name, body in re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", hlo, re.M | re.S)
        if "custom_call_target" in body
    }
    _, entry = hlo.split("\nENTRY ")
    found = re.findall(r"^ +(?:ROOT )?%?\S+ = .*? ([\w-]+)\((.*)$", entry, re.M)
    calls = ((op, re.search(r"calls=%?([\w.]+)", rest)) for op, rest in found)
    return Counter(
        op for op, body in calls if op not in FREE and (not body or body[1] not in kernels)
    )
