"""The model on a mesh: how arrays are split, and the one `shard_map` that everything runs in.

The mesh has two axes. Along "dp" groups of devices work on different sequences with the same
weights; along "tp" the devices of a group share each sequence and split the weights. Written out:

    array                whole                   split over
    bytes, logits        [batch * sequence, …]   rows, over ("dp", "tp")
    split weights        as in model.py          one dimension, over "tp"
    experts              as in model.py          experts, over ("dp", "tp")
    norms, table, head   as in model.py          nothing: the same on every device

Only the loss and its gradients are computed inside `shard_map`. Whatever comes after sees whole
arrays and knows nothing of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import config
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import AXES, Transformer

ROWS = P(AXES)
ANY = config.Execution()

type Tree = Any  # nested dicts of arrays, or of what stands for them


def make_mesh(dp: int, tp: int) -> Mesh:
    """A mesh of `dp` groups of `tp` devices, neighbours in a group.

    Raises:
      ValueError: there are not as many devices, or some process would have none.
    """
    devices = jax.devices()
    if dp * tp > len(devices) or (dp * tp < len(devices) and jax.process_count() > 1):
        raise ValueError(
            f"dp={dp} x tp={tp} needs {dp * tp} devices and there are {len(devices)}; pass others,"
            " or start the job with another -n."
        )
    return Mesh(np.array(devices[: dp * tp]).reshape(dp, tp), AXES)


def structure(sizes: config.Sizes, how: config.Execution = ANY) -> tuple[nnx.GraphDef, Tree, Tree]:
    """The model without its weights; the weights' shapes; and how each is split.

    Of the three, `how` makes a difference to the first.
    """
    model = nnx.eval_shape(lambda: Transformer(sizes, how, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))


def shardings(mesh: Mesh, specs: Tree) -> Tree:
    """`NamedSharding`s on `mesh` for a tree of `PartitionSpec`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def initial_weights(mesh: Mesh, sizes: config.Sizes, seed: int) -> Tree:
    """Random weights, each device making its part; the same numbers on every mesh."""

    def initialize() -> Tree:
        return nnx.to_pure_dict(nnx.state(Transformer(sizes, ANY, nnx.Rngs(seed))))

    _, _, specs = structure(sizes)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # It runs once; optimised for a CPU, it would compile longer than it runs.
    quickly = {"xla_backend_optimization_level": 0} if on_cpu else None
    where = shardings(mesh, specs)
    return jax.jit(initialize, out_shardings=where, compiler_options=quickly)()


def weight_shapes(mesh: Mesh, sizes: config.Sizes, dtype: str) -> Tree:
    """The weights as `jax.ShapeDtypeStruct`s with their shardings, nothing allocated."""
    _, shapes, specs = structure(sizes)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, dtype, sharding=where),
        shapes,
        shardings(mesh, specs),
    )


def row_shapes(mesh: Mesh, batch: int, sequence: int) -> jax.ShapeDtypeStruct:
    """What `put_rows` makes of `[batch, sequence]`, nothing allocated."""
    return jax.ShapeDtypeStruct((batch * sequence,), jnp.int32, sharding=NamedSharding(mesh, ROWS))


def put_rows(mesh: Mesh, batch: np.ndarray) -> jax.Array:
    """`[batch, sequence]`, known to every process, as rows split over all devices of `mesh`."""
    rows = batch.reshape(-1)
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, ROWS), lambda index: rows[index]
    )


def loss(mesh: Mesh, sizes: config.Sizes, how: config.Execution) -> Callable[..., jax.Array]:
    """The function (weights, tokens, targets) -> mean loss in nats per byte, for `jax.jit`."""
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        share, _ = _shares(sizes, how, weights, tokens, targets)
        return lax.psum(share, AXES)

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, ROWS, ROWS), out_specs=P())


def loss_and_gradients(
    mesh: Mesh, sizes: config.Sizes, how: config.Execution
) -> Callable[..., tuple[jax.Array, Tree]]:
    """The function (weights, tokens, targets) -> (mean loss, gradients), for `jax.jit`.

    With experts the loss is that of `loss` and, times `config.BALANCE`, what balances their load.
    """
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Tree]:
        # Every device differentiates its share of the loss by its own copy of the weights. A copy
        # that others hold as well gets terms of its gradient there, which are summed here, once,
        # for all layers together. Without the cast JAX would insert the sums, a few for each layer.
        copies = jax.tree.map(lambda w, s: _cast(w, _unsplit(s)), weights, specs)

        def share_of_loss(weights: Tree) -> jax.Array:
            share, balance = _shares(sizes, how, weights, tokens, targets)
            return share if balance is None else share + config.BALANCE * balance

        share, gradients = jax.value_and_grad(share_of_loss)(copies)
        gradients = jax.tree.map(lambda g, s: lax.psum(g, _unsplit(s)), gradients, specs)
        return lax.psum(share, AXES), gradients

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, ROWS, ROWS), out_specs=(P(), specs))


def logits(mesh: Mesh, sizes: config.Sizes, how: config.Execution) -> Callable[..., jax.Array]:
    """The function (weights, tokens) -> logits float32 `[rows, 256]`, for `jax.jit`."""
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array) -> jax.Array:
        return _model(sizes, how, weights)(tokens)[0]

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, ROWS), out_specs=ROWS)


def _model(sizes: config.Sizes, how: config.Execution, weights: Tree) -> Transformer:
    """The model with these weights, converted to the type it computes in: once, for all layers."""
    graph, _, _ = structure(sizes, how)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(how.dtype), weights))


def _shares(sizes, how, weights, tokens, targets) -> tuple[jax.Array, jax.Array | None]:
    """What this device's rows add to the mean over all rows; and to what balances experts."""
    rows = len(tokens) * lax.axis_size(AXES)
    logits, balance = _model(sizes, how, weights)(tokens)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.take_along_axis(log_p, targets[:, None], axis=1)) / rows, balance


def _unsplit(spec: P) -> tuple[str, ...]:
    """The mesh axes over which a weight is not split."""
    split = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis in AXES if axis not in split)


def _cast(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pcast(weight, axes, to="varying")
