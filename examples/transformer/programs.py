"""The programs that the benchmark times: parts of a step, each with several backends."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import config
import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax.sharding import Mesh

from stretto.kernels.choice import choose
from stretto.layers import products

PARTS = ("forward", "gradients", "remat", "step")
BACKENDS = ("xla", "auto", "pallas", "silent")


class Silent:
    """Stands in for Stretto's matmuls: the same arithmetic on as much data, nothing sent."""

    @staticmethod
    def all_gather_matmul(x, weights, axis_name, **_):
        """Matmuls of this device's rows, repeated as often as there are devices."""
        rows = jnp.tile(x, (jax.lax.axis_size(axis_name), 1))
        return tuple(jax.lax.optimization_barrier(rows) @ weight for weight in weights)

    @staticmethod
    def matmul_reduce_scatter(x, weights, axis_name, **_):
        """A matmul, and the sum over as many parts of it as there are devices."""
        product = jax.lax.optimization_barrier(x @ weights)
        return product.reshape(jax.lax.axis_size(axis_name), -1, product.shape[1]).sum(0)


class Weights:
    """What programs of one configuration run on: made when first needed, and shared by them all.

    Args:
      mesh, sizes, training: as elsewhere; the length of the sequence does not matter.
      dtype: of `cast`.
    """

    def __init__(self, mesh: Mesh, sizes: config.Sizes, training: config.Training, dtype: str):
        self._made_of = mesh, sizes, training
        self._dtype = dtype

    @functools.cached_property
    def cast(self) -> parallel.Tree:
        """Random weights in `dtype`."""
        mesh, sizes, training = self._made_of
        cast = jax.jit(lambda tree: jax.tree.map(lambda w: w.astype(self._dtype), tree))
        return cast(parallel.initial_weights(mesh, sizes, training.seed))

    @functools.cached_property
    def state(self) -> Any:
        """A `TrainState`; a step consumes it, and puts the next one in its place."""
        from step import initial_state  # the other parts need no Optax

        return initial_state(*self._made_of)


class Program:
    """A compiled part of a step with what it runs on: the weights, and random bytes."""

    def __init__(self, part: str, compiled: Any, weights: Weights, rows: jax.Array):
        self.compiled = compiled
        self._trains = part == "step"
        self._weights = weights
        self._rows = rows, rows  # the bytes, which are also what is to be predicted

    def run(self) -> jax.Array:
        """Queues one run; returns its loss, a number that is there when the run has completed."""
        if self._trains:
            self._weights.state, loss = self.compiled(self._weights.state, *self._rows)
            return loss
        out = self.compiled(self._weights.cast, *self._rows)
        return out[0] if isinstance(out, tuple) else out

    def needed_bytes(self) -> int:
        """Memory on one device: operands, results and what lies between."""
        stats = self.compiled.memory_analysis()
        return (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )


def random_rows(mesh: Mesh, batch: int, sequence: int) -> jax.Array:
    """Random bytes, split over the mesh."""
    random_bytes = np.random.default_rng(0).integers(config.VOCABULARY, size=(batch, sequence))
    return parallel.put_rows(mesh, random_bytes.astype(np.int32))


def lower(
    mesh: Mesh,
    sizes: config.Sizes,
    training: config.Training,
    how: config.Execution,
    part: str,
    backend: str,
) -> tuple[jax.stages.Lowered, list[str]]:
    """A part of the step with a backend, ready to be compiled, with nothing allocated.

    Returns:
      The function of weights (or, for "step", of a whole `TrainState`), bytes and targets; and
      which implementation its operations took, and why.
    """
    remat = "layer" if part == "remat" else "elementwise"
    silent = backend == "silent"
    how = dataclasses.replace(how, backend="xla" if silent else backend, remat=remat)
    rows = parallel.row_shapes(mesh, training.batch, sizes.sequence)
    if part == "step":
        from step import make_train_step, state_shapes

        function = make_train_step(mesh, sizes, training, how)
        takes = state_shapes(mesh, sizes, training)
    else:
        make = parallel.loss if part == "forward" else parallel.loss_and_gradients
        function = jax.jit(make(mesh, sizes, how))
        takes = parallel.weight_shapes(mesh, sizes, how.dtype)
    stand_in = Silent if silent else products.matmuls
    with mock.patch.object(products, "matmuls", stand_in), choose.recorded() as choices:
        traced = function.trace(takes, rows, rows)
    return traced.lower(), sorted(set(map(str, choices)))
