"""The collectives over several nodes: kernels within each, XLA's collectives between them.

Each device exchanges with the device of its number on the other nodes, so every byte crosses
between nodes once, over all of a node's network cards. Results have the order of the whole team:
nodes first, then the devices of each.

Each function takes a `Call` whose `split` has the axes within a node; its `config` is of the
kernel that gathers, or of the one that adds.
"""

from __future__ import annotations

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp

from stretto.distributed.devices.topology import Split
from stretto.kernels.collectives import arrays, row_layout
from stretto.kernels.nodes import nodes, pipelines
from stretto.kernels.nodes.nodes import Nodes
from stretto.kernels.operation import Call


def all_gather(x: jax.Array, call: Call) -> jax.Array:
    """Every device's `x`, joined along `axis`, as the public operation."""
    axis = call.options.axis
    team = Nodes.of(cast(Split, call.split))
    values = x.reshape(-1)
    most = nodes.most_pieces(values.nbytes, nodes.LEAST_BYTES, call.pieces)
    gathered = pipelines.gather(
        team,
        values,
        team.cut(values.size, most, row_layout.columns_of(x.dtype) * row_layout.ROWS),
        functools.partial(
            arrays.all_gather,
            axes=team.inner,
            axis=0,
            config=call.config,
            interpret=call.interpret,
        ),
    )
    out = nodes.room_for((team.count, team.devices, values.size), gathered[0][2])
    for node, first, part in gathered:
        out = nodes.place(out, part.reshape(1, team.devices, -1), node, 0, first)
    parts = out.reshape(-1, *x.shape)
    return jnp.moveaxis(parts, 0, axis).reshape(
        *x.shape[:axis], len(parts) * x.shape[axis], *x.shape[axis + 1 :]
    )


def reduce_scatter(x: jax.Array, call: Call) -> jax.Array:
    """This device's part along `axis` of the sum, as the public operation.

    A node's sum of narrow floats is rounded once; the nodes' sums are added in float32.
    """
    axis = call.options.axis
    team = Nodes.of(cast(Split, call.split))
    parts = arrays.split(x, axis, team.count * team.devices)
    size = math.prod(parts.shape[1:])
    most = nodes.most_pieces(team.devices * size * x.dtype.itemsize, nodes.LEAST_BYTES, call.pieces)
    total = pipelines.scatter(
        team,
        parts.reshape(team.count, team.devices, size),
        team.cut(size, most, row_layout.columns_of(x.dtype) * row_layout.ROWS),
        functools.partial(
            arrays.reduce_scatter,
            axes=team.inner,
            axis=0,
            config=call.config,
            interpret=call.interpret,
        ),
    )
    return total.reshape(parts.shape[1:])


def all_reduce(x: jax.Array, call: Call) -> jax.Array:
    """The sum of every device's `x`, as the public operation.

    A node's sum of narrow floats is rounded once; XLA adds the nodes' sums in the operand's type.
    """
    team = Nodes.of(cast(Split, call.split))
    values = x.reshape(-1)
    most = nodes.most_pieces(values.nbytes, nodes.LEAST_BYTES, call.pieces)
    multiple = row_layout.columns_of(x.dtype) * row_layout.ROWS * team.devices

    def scatter(part: jax.Array) -> jax.Array:
        part = jnp.pad(part, (0, -part.size % team.devices))
        return arrays.reduce_scatter(
            part, axes=team.inner, axis=0, config=call.config, interpret=call.interpret
        )

    total = pipelines.reduce(
        team,
        values,
        nodes.pieces_of(values.size, most, multiple),
        scatter=scatter,
        gather=lambda part: arrays.all_gather_of_sums(
            part, axes=team.inner, interpret=call.interpret
        ),
    )
    return total.reshape(x.shape)
