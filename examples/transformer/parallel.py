"""The model on a mesh: how arrays are split, and the one `shard_map` that everything runs in.

The mesh has two axes, or three. Along "dp" groups of devices work on different sequences with the
same weights; along "tp" the devices of a group share each sequence and split the weights; along
"cp" devices with the same weights have some bytes of each sequence. Written out:

    array                whole                   split over
    bytes, logits        [batch * sequence, …]   rows, over ("dp", "tp") or ("dp", "cp", "tp")
    split weights        as in model.py          one dimension, over "tp"
    experts              as in model.py          experts, over ("dp", "tp")
    norms, table, head   as in model.py          nothing: the same on every device

Only the loss and its gradients are computed inside `shard_map`. Whatever comes after sees whole
arrays and knows nothing of the mesh.
"""

from __future__ import annotations

import dataclasses
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

AXES_OF_THREE = ("dp", "cp", "tp")
ANY = config.Execution()

type Tree = Any  # nested dicts of arrays, or of what stands for them


def make_mesh(dp: int, tp: int, cp: int = 1) -> Mesh:
    """A mesh of `dp` groups of `cp * tp` devices, neighbours in a group; "cp" is there above 1.

    Raises:
      ValueError: there are not as many devices, or some process would have none.
    """
    devices, count = jax.devices(), dp * cp * tp
    if count > len(devices) or (count < len(devices) and jax.process_count() > 1):
        sizes = f"dp={dp} x cp={cp} x tp={tp}" if cp > 1 else f"dp={dp} x tp={tp}"
        raise ValueError(
            f"{sizes} needs {count} devices and there are {len(devices)}; pass others,"
            " or start the job with another -n."
        )
    shape, axes = ((dp, cp, tp), AXES_OF_THREE) if cp > 1 else ((dp, tp), AXES)
    return Mesh(np.array(devices[:count]).reshape(shape), axes)


def cp_of(mesh: Mesh) -> int:
    """Devices that share each sequence by its bytes."""
    return mesh.shape.get("cp", 1)


def rows_on(mesh: Mesh) -> P:
    """How rows are split."""
    return P(mesh.axis_names)


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
    where = NamedSharding(mesh, rows_on(mesh))
    return jax.ShapeDtypeStruct((batch * sequence,), jnp.int32, sharding=where)


def put_rows(mesh: Mesh, batch: np.ndarray) -> jax.Array:
    """`[batch, sequence]`, known to every process, as rows split over all devices of `mesh`."""
    rows = in_parts(batch, mesh).reshape(-1)
    where = NamedSharding(mesh, rows_on(mesh))
    return jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])


def in_parts(batch: Any, mesh: Mesh) -> Any:
    """`[batch, sequence]` in the order in which devices have them: `[dp, cp, batch / dp, ...]`.

    In zigzag, a device along "cp" has a chunk from both ends of each sequence of its group.
    """
    cp, dp = cp_of(mesh), mesh.shape["dp"]
    if cp == 1:
        return batch
    order = [chunk for i in range(cp) for chunk in (i, 2 * cp - 1 - i)]
    chunks = batch.reshape(dp, len(batch) // dp, 2 * cp, -1)[:, :, np.array(order)]
    return chunks.reshape(dp, len(batch) // dp, cp, -1).swapaxes(1, 2)


def loss(mesh: Mesh, sizes: config.Sizes, how: config.Execution) -> Callable[..., jax.Array]:
    """The function (weights, tokens, targets) -> mean loss in nats per byte, for `jax.jit`."""
    how, axes, rows = _on(mesh, how), mesh.axis_names, rows_on(mesh)
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        share, _ = _shares(sizes, how, axes, weights, tokens, targets)
        return lax.psum(share, axes)

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, rows, rows), out_specs=P())


def loss_and_gradients(
    mesh: Mesh, sizes: config.Sizes, how: config.Execution
) -> Callable[..., tuple[jax.Array, Tree]]:
    """The function (weights, tokens, targets) -> (mean loss, gradients), for `jax.jit`.

    With experts the loss is that of `loss` and, times `config.BALANCE`, what balances their load.
    """
    how, axes, rows = _on(mesh, how), mesh.axis_names, rows_on(mesh)
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Tree]:
        # Every device differentiates its share of the loss by its own copy of the weights. A copy
        # that others hold as well gets terms of its gradient there, which are summed here, once,
        # for all layers together. Without the cast JAX would insert the sums, a few for each layer.
        copies = jax.tree.map(lambda w, s: _cast(w, _unsplit(s, axes)), weights, specs)

        def share_of_loss(weights: Tree) -> jax.Array:
            share, balance = _shares(sizes, how, axes, weights, tokens, targets)
            return share if balance is None else share + config.BALANCE * balance

        share, gradients = jax.value_and_grad(share_of_loss)(copies)
        gradients = jax.tree.map(lambda g, s: lax.psum(g, _unsplit(s, axes)), gradients, specs)
        return lax.psum(share, axes), gradients

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, rows, rows), out_specs=(P(), specs))


def logits(mesh: Mesh, sizes: config.Sizes, how: config.Execution) -> Callable[..., jax.Array]:
    """The function (weights, tokens) -> logits float32 `[rows, 256]`, for `jax.jit`."""
    how, rows = _on(mesh, how), rows_on(mesh)
    _, _, specs = structure(sizes)

    def on_device(weights: Tree, tokens: jax.Array) -> jax.Array:
        return _model(sizes, how, weights)(tokens)[0]

    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, rows), out_specs=rows)


def _on(mesh: Mesh, how: config.Execution) -> config.Execution:
    return dataclasses.replace(how, cp=cp_of(mesh))


def _model(sizes: config.Sizes, how: config.Execution, weights: Tree) -> Transformer:
    """The model with these weights, converted to the type it computes in: once, for all layers."""
    graph, _, _ = structure(sizes, how)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(how.dtype), weights))


def _shares(sizes, how, axes, weights, tokens, targets) -> tuple[jax.Array, jax.Array | None]:
    """What this device's rows add to the mean over all rows; and to what balances experts."""
    rows = len(tokens) * lax.axis_size(axes)
    logits, balance = _model(sizes, how, weights)(tokens)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.take_along_axis(log_p, targets[:, None], axis=1)) / rows, balance


def _unsplit(spec: P, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the mesh's axes over which a weight is not split."""
    split = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis in axes if axis not in split)


def _cast(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pcast(weight, axes, to="varying")
