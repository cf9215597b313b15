"""What makes operands of the operations of experts fit each other, and the rows that they need."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from stretto.kernels.problem import checks

COMBINE = "expert_combine"
ROWS = 8
"""Of which the rows of a buffer for the worst case are a multiple: `grouped_matmul` copies none."""


def check_num_experts(op: str, w_out: Any, devices: int) -> int:
    """How many experts the devices have in all; raises ValueError unless w_out is `[e, f, d]`."""
    if w_out.ndim != 3:
        raise ValueError(f"{op}: w_out has shape {w_out.shape}; it must be [e, f, d].")
    return devices * w_out.shape[0]


def check_routing(
    op: str, x: Any, expert_index: Any, num_experts: int, capacity: int | None, devices: int
) -> int:
    """The rows that each device has room for; raises ValueError unless tokens can be sent so."""
    checks.check_array(op, "x", x)
    checks.check_array(op, "expert_index", expert_index)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{op}: x is {x.dtype}{list(x.shape)}; it must be [tokens, d] of floating-point"
            " numbers. Reshape or cast it."
        )
    indices = expert_index.ndim == 2 and expert_index.shape[0] == x.shape[0]
    if not indices or not jnp.issubdtype(expert_index.dtype, jnp.integer):
        raise ValueError(
            f"{op}: expert_index is {expert_index.dtype}{list(expert_index.shape)}; it must be"
            f" int32[{x.shape[0]}, top_k], the experts of each of the {x.shape[0]} tokens of x."
        )
    num_experts = checks.check_integer(op, "num_experts", num_experts)
    if num_experts < 1:
        raise ValueError(f"{op}: num_experts={num_experts} must be at least 1.")
    if num_experts % devices:
        raise ValueError(
            f"{op}: num_experts={num_experts} must be a multiple of the {devices} devices, which"
            " have as many each; add experts that nobody chooses."
        )
    if capacity is not None:
        most = checks.check_integer(op, "capacity", capacity)
        if most < 1:
            raise ValueError(f"{op}: capacity={most} must be at least 1; None drops nothing.")
        capacity = most
    tokens, top_k = expert_index.shape
    rows = room_for(tokens, top_k, devices, capacity)
    if checks.is_symbolic(x, expert_index):
        return rows
    places = rows * devices
    if places >= 2**31:
        raise ValueError(
            f"{op}: {tokens} tokens of top_k={top_k} on {devices} devices may go to {places} rows"
            " of all devices, and 2^31 is the limit; pass fewer tokens at once, or a smaller"
            " capacity."
        )
    return rows


def check_combine(rows: Any, weights: Any, positions: Any) -> None:
    """Raises ValueError unless results can be brought back so."""
    for name, x in (("rows", rows), ("weights", weights), ("positions", positions)):
        checks.check_array(COMBINE, name, x)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"{COMBINE}: rows is {rows.dtype}{list(rows.shape)}; it must be [capacity, d] of"
            " floating-point numbers."
        )
    if positions.ndim != 2 or positions.dtype != jnp.int32:
        raise ValueError(
            f"{COMBINE}: positions is {positions.dtype}{list(positions.shape)}; it must be"
            " int32[tokens, top_k], routing.positions of expert_dispatch."
        )
    if weights.shape != positions.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{COMBINE}: weights is {weights.dtype}{list(weights.shape)}; it must be"
            f" floating-point{list(positions.shape)}, a weight for each of positions."
        )


def room_for(tokens: int, top_k: int, devices: int, capacity: int | None) -> int:
    """Rows that each device has room for."""
    if capacity is not None:
        return capacity
    needed = -(-devices * tokens * top_k // ROWS) * ROWS
    return max(2 * ROWS, needed) if isinstance(needed, int) else needed
