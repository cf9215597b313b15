"""What operands of `context_parallel_attention` must be."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from stretto.kernels.operations.attention_methods import OP
from stretto.kernels.problem import checks


def check_operands(q: Any, k: Any, v: Any, causal: bool, window: int | None) -> int | None:
    """`window` as an integer; raises ValueError for what does not fit."""
    checks.check_flag(OP, "causal", causal)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_array(OP, name, x)
        if x.ndim != 4 or 0 in x.shape[2:]:
            raise ValueError(
                f"{OP}: {name} has shape {x.shape}; it must be [batch, tokens, heads, dim]."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != q.dtype:
            raise ValueError(
                f"{OP}: {name} is {x.dtype} and q is {q.dtype}; all must be of one floating-point"
                " type. Cast them."
            )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{OP}: q {q.shape}, k {k.shape} and v {v.shape} must agree in batch and dim, and k and"
            " v in all."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{OP}: heads={q.shape[2]} of q must be a multiple of kv_heads={k.shape[2]}."
        )
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{OP}: causal=True needs as many keys as queries, not {k.shape[1]} for {q.shape[1]};"
            " pass causal=False."
        )
    if window is None:
        return None
    if not causal or checks.check_integer(OP, "window", window) < 1:
        raise ValueError(f"{OP}: window={window} must be at least 1, and needs causal=True.")
    return min(int(window), jnp.iinfo(jnp.int32).max)


def check_segments(q: Any, k: Any, segments: Any, others: Any) -> None:
    """Raises ValueError unless ids of documents fit the tokens of q, and of k."""
    if (segments is None) != (others is None):
        raise ValueError(
            f"{OP}: segment_ids and kv_segment_ids belong together; pass both or neither."
        )
    for name, ids, x in (("segment_ids", segments, q), ("kv_segment_ids", others, k)):
        if ids is None:
            continue
        checks.check_array(OP, name, ids)
        if ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"{OP}: {name} is {ids.dtype}{list(ids.shape)}; it must be of integers,"
                f" {list(x.shape[:2])}."
            )
