"""Tokens to their experts and back by `lax.ragged_all_to_all`, as a user could write it in JAX.

Entries are put in the order of their experts, and each expert's go in chunks of their own. With one
chunk a device XLA's sending took 25.7 ms for 268 MB on 4 H200s, with 32 it took 1.24; so several
numbers are tried. Each choice crosses by itself. It is for GPUs only: on a CPU JAX has no
`ragged_all_to_all`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.operation import Operation
from stretto.kernels.operations import expert_checks, experts, mixture
from stretto.kernels.problem.activations import swiglu
from stretto.kernels.xla.routing import ranks_in_groups

CHUNKS = (1, 2, 4)
"""Numbers of chunks, of each expert's entries, that are tried."""


class Plan(NamedTuple):
    """What goes where from one device: its entries' `order`, and chunks `[chunks of all experts]`.

    Chunks begin at `here` among the sorted entries, and at `there` on the device of the expert;
    `sizes` are theirs, and `coming` those of the chunks that come to this device, where they begin
    at `came_to`; each is from `back` among the sorted entries of where it came from.
    """

    order: jax.Array
    here: jax.Array
    there: jax.Array
    sizes: jax.Array
    coming: jax.Array
    came_to: jax.Array
    back: jax.Array
    group_sizes: jax.Array


def plan(index: jax.Array, axes: tuple, num_experts: int, chunks: int) -> Plan:
    """The plan of experts `[tokens, top_k]`, none of which is -1."""
    devices, me = lax.axis_size(axes), lax.axis_index(axes)
    entries = index.reshape(-1)
    ranks, counts = ranks_in_groups(entries, num_experts)
    before = jnp.cumsum(counts) - counts
    order = jnp.zeros_like(entries).at[before[entries] + ranks].set(jnp.arange(len(entries)))
    all_counts = lax.all_gather(counts, axes)  # [from, expert]
    parts = _parts(all_counts, chunks)  # [from, expert, chunk]
    own = num_experts // devices
    # Rows on a device: expert by expert, then device by device, chunk by chunk.
    by_device = parts.reshape(devices, devices, own, chunks).transpose(1, 2, 0, 3)
    flat = by_device.reshape(devices, -1)
    starts = (jnp.cumsum(flat, axis=1) - flat).reshape(by_device.shape)  # [to, expert, from, chunk]
    # Sorted entries of a device: expert by expert, chunk by chunk.
    sorted_ = parts.reshape(devices, -1)
    firsts = (jnp.cumsum(sorted_, axis=1) - sorted_).reshape(devices, devices, -1)
    return Plan(
        order=order,
        here=firsts[me].reshape(-1),
        there=starts[:, :, me].reshape(-1),
        sizes=sorted_[me],
        coming=by_device[me].transpose(1, 0, 2).reshape(-1),
        came_to=starts[me].transpose(1, 0, 2).reshape(-1),
        back=firsts[:, me].reshape(-1),
        group_sizes=all_counts.sum(0).reshape(devices, own)[me],
    )


def _parts(counts: jax.Array, chunks: int) -> jax.Array:
    """Numbers cut into `chunks` parts each, `[..., chunks]`, as even as they come."""
    number = jnp.arange(chunks + 1)
    return jnp.diff(counts[..., None] * number // chunks, axis=-1)


def there(x: jax.Array, plan: Plan, axes: tuple, rows: int, top_k: int) -> jax.Array:
    """`[tokens, d]` -> `[rows, d]`, as `expert_dispatch` orders them."""
    sent = x[plan.order // top_k]
    out = jnp.zeros((rows, x.shape[1]), x.dtype)
    args = plan.here, plan.sizes, plan.there, plan.coming
    return lax.ragged_all_to_all(sent, out, *args, axis_name=axes)


def back(rows: jax.Array, weights: jax.Array, plan: Plan, axes: tuple) -> jax.Array:
    """`[rows, d]`, `[tokens, top_k]` -> `[tokens, d]`."""
    tokens, top_k = weights.shape
    out = jnp.zeros((tokens * top_k, rows.shape[1]), rows.dtype)
    args = plan.came_to, plan.coming, plan.back, plan.sizes
    came = lax.ragged_all_to_all(rows, out, *args, axis_name=axes)
    unsorted = jnp.zeros_like(came).at[plan.order].set(came, unique_indices=True)
    wide = unsorted.reshape(tokens, top_k, -1).astype(jnp.float32)
    return jnp.sum(weights[..., None] * wide, axis=1).astype(rows.dtype)


def _dispatch(x: jax.Array, index: jax.Array, *, axes: tuple, num_experts: int, chunks: int) -> Any:
    found = plan(index, axes, num_experts, chunks)
    tokens, top_k = index.shape
    rows = expert_checks.room_for(tokens, top_k, lax.axis_size(axes), None)
    return there(x, found, axes, rows, top_k)


def _layer(
    x: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    axes: tuple,
    num_experts: int,
    chunks: int,
) -> Any:
    found = plan(index, axes, num_experts, chunks)
    tokens, top_k = index.shape
    rows = expert_checks.room_for(tokens, top_k, lax.axis_size(axes), None)
    came = there(x, found, axes, rows, top_k)
    product = functools.partial(lax.ragged_dot, preferred_element_type=jnp.float32)
    hidden = swiglu(*jnp.split(product(came, w_in, found.group_sizes), 2, axis=1)).astype(x.dtype)
    made = product(hidden, w_out, found.group_sizes).astype(x.dtype)
    return back(made, weights, found, axes)


RAGGED: dict[Operation, Any] = {
    experts.EXPERT_DISPATCH: _dispatch,
    mixture.MIXTURE_OF_EXPERTS: _layer,
}


def ragged(case: Case, mesh: Mesh) -> list[Candidate]:
    """One candidate for each number of chunks."""
    if case.devices == 1:
        raise UnavailableError("one device sends nothing")
    if mesh.devices.flat[0].platform == "cpu":
        raise UnavailableError("JAX has no ragged_all_to_all on a CPU")
    body = functools.partial(
        RAGGED[case.operation],
        axes=tuple(mesh.axis_names),
        num_experts=case.sizes["num_experts"],
    )
    return [
        Candidate(
            body=functools.partial(body, chunks=chunks),
            operands=case.operands,
            config=f"{chunks} chunks an expert",
        )
        for chunks in CHUNKS
    ]
