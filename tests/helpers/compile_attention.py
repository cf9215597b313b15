"""Cases of `compile_cases`: attention over several devices, and its derivative."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from compile_programs import Program, on_one

import stretto as st
from stretto.distributed.team import Team
from stretto.distributed.tools import aot
from stretto.kernels.fused import attention_config, attention_derivative
from stretto.kernels.operations import attention_options


def attention() -> Iterator[Program]:
    """The collectives that move keys, and heads, with what is computed beside them."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    operands = [((1, 256, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    for label, options in {
        "gathered together": dict(config=attention_options.Config(by_peer=False)),
        "heads": dict(method="heads"),
    }.items():

        def call(q, k, v, options=options):
            options = dict(causal=True, layout="zigzag", backend="pallas", **options)
            return st.context_parallel_attention(q, k, v, "x", **options)

        def pulled(q, k, v, call=call):
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(out)

        yield label, *on_one(pulled, mesh, operands)


def attention_kernel(which: str) -> Iterator[Program]:
    """The kernel that pulls keys, for each size of heads and each mask."""
    causal = dict(causal=True, layout="zigzag")
    devices, heads, calls = {
        "128": (2, (8, 2, 128), _of_candidates(causal)),
        "64": (4, (8, 4, 64), {"zigzag": causal}),
        "64, full": (4, (8, 4, 64), {"full": {}}),
        "full": (2, (4, 4, 128), {"full": {}}),
        "documents": (2, (8, 2, 128), {"zigzag": causal, "full": {}}),
        # Where most is left to the warps that move data, which have few registers.
        "window": (8, (8, 2, 128), {"window": dict(causal=True, window=1000)}),
    }[which]
    mesh = aot.mesh_of_gpus((devices,), ("x",))
    operands = [((1, 1024, count, heads[2]), jnp.bfloat16) for count in (*heads[:2], heads[1])]
    if which == "documents":
        operands.append(((1, 1024), jnp.int32))
    for label, options in calls.items():

        def call(q, k, v, ids=None, options=options):
            return st.context_parallel_attention(
                q, k, v, "x", segment_ids=ids, method="fused", backend="pallas", **options
            )

        yield f"{label}, {which}", *on_one(call, mesh, operands)


def _of_candidates(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same call in each configuration that the tuner tries for heads of 128."""
    problem = types.SimpleNamespace(sizes=dict(dim=128))
    configs = attention_config.Config.candidates(problem)
    return {f"zigzag, {config}": dict(options, config=config) for config in configs}


def attention_derivative_kernel(dim: int, *, packed: bool = False) -> Iterator[Program]:
    """The kernel of attention's derivative, for each mask, and by the keys of a peer.

    If `packed`, of documents.
    """
    operands = [((1, 1024, count, dim), jnp.bfloat16) for count in (8, 2, 2, 8)]
    rows = [((1, 8, 1024), jnp.float32)] * 2
    ids = [((1, 1024), jnp.int32)] * 2 if packed else []
    calls = {
        "full": (attention_config.Sequence(), 1),
        "causal": (attention_config.Sequence(causal=True), 1),
        "window": (attention_config.Sequence(causal=True, window=300), 1),
        "zigzag": (attention_config.Sequence(chunks=2, causal=True), 2),
    }
    for label, (sequence, devices) in calls.items():

        def call(q, k, v, bar, lse, delta, *segments, sequence=sequence, devices=devices):
            return attention_derivative.derive(
                *(q, k, v, bar, lse, delta, sequence),
                scale=q.shape[-1] ** -0.5,
                distance=devices - 1,
                team=Team.along("x"),
                segments=segments or None,
            )

        mesh = aot.mesh_of_gpus((devices,), ("x",))
        yield label, *on_one(call, mesh, [*operands, *rows, *ids])


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "attention": attention,
    **{
        f"attention kernel, {which}": functools.partial(attention_kernel, which)
        for which in ("128", "64", "64, full", "full", "window", "documents")
    },
    **{
        f"attention derivative, {dim}{words}": functools.partial(
            attention_derivative_kernel, dim, packed=bool(words)
        )
        for dim in (64, 128)
        for words in ("", ", documents")
    },
}
