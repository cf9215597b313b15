"""The programs that the benchmark times: parts of a step, each with several backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import config
import jax
import jax.numpy as jnp
import model
import numpy as np
import parallel
from jax.sharding import Mesh

import stretto as st
from stretto.benchmarks.compiling import Compiler
from stretto.kernels import dispatch

PARTS = ("forward", "gradients", "remat", "step")
BACKENDS = ("xla", "auto", "pallas", "silent")

type Key = tuple[str, str]  # a part and a backend


class Silent:
    """Stands in for `stretto`: the same arithmetic on the same amount of data, nothing sent."""

    @staticmethod
    def all_gather_matmul(x, weights, axis_name, **_):
        """A matmul on this device's rows, repeated as often as there are devices."""
        rows = jnp.tile(x, (jax.lax.axis_size(axis_name), 1))
        return jax.lax.optimization_barrier(rows) @ weights

    @staticmethod
    def matmul_reduce_scatter(x, weights, axis_name, **_):
        """A matmul, and the sum over as many parts of it as there are devices."""
        product = jax.lax.optimization_barrier(x @ weights)
        return product.reshape(jax.lax.axis_size(axis_name), -1, product.shape[1]).sum(0)


class Program:
    """A compiled part of a step with all that it takes.

    Args:
      compiled: maps (state, *rows) to the next state and a loss, or to the loss first and,
        where it has them, gradients.
      state: weights, or a whole training state that each run consumes and replaces.
      rows: the bytes, which are also what is to be predicted.
      replaces_state: which of the two.
    """

    def __init__(self, compiled: Any, state: Any, rows: jax.Array, replaces_state: bool):
        self.compiled = compiled
        self._state = state
        self._rows = rows, rows
        self._replaces_state = replaces_state

    def run(self) -> jax.Array:
        """Queues one run; returns its loss, a number that is there when the run has completed."""
        if self._replaces_state:
            self._state, loss = self.compiled(self._state, *self._rows)
            return loss
        out = self.compiled(self._state, *self._rows)
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


class Inputs:
    """What the programs of one model run on: random bytes, and weights in the type `how` names.

    `choices` says, for each program, which implementation its operations took, and why.
    """

    def __init__(
        self,
        mesh: Mesh,
        sizes: config.Sizes,
        training: config.Training,
        how: config.Execution,
    ):
        self.mesh, self.sizes, self.training, self.how = mesh, sizes, training, how
        self.choices: dict[str, list[str]] = {}
        shape = training.batch, sizes.sequence
        random_bytes = np.random.default_rng(0).integers(config.VOCABULARY, size=shape)
        self.rows = parallel.put_rows(mesh, random_bytes.astype(np.int32))
        weights = parallel.initial_weights(mesh, sizes, 0)
        cast = jax.jit(lambda tree: jax.tree.map(lambda w: w.astype(how.dtype), tree))
        self.weights = cast(weights)

    def lower(self, part: str, backend: str) -> tuple[jax.stages.Lowered, Any]:
        """A part of the step with a backend, ready to be compiled, and what it takes first."""
        remat = "layer" if part == "remat" else "elementwise"
        how = dataclasses.replace(self.how, backend=backend, remat=remat)
        stand_in = Silent if backend == "silent" else st
        state = self.weights
        if part == "step":
            from step import initial_state, make_train_step  # the others need no Optax

            state = initial_state(self.mesh, self.sizes, self.training)
            function = make_train_step(self.mesh, self.sizes, self.training, how)
        else:
            make = parallel.loss if part == "forward" else parallel.loss_and_gradients
            function = jax.jit(make(self.mesh, self.sizes, how))
        with mock.patch.object(model, "st", stand_in), dispatch.recorded() as choices:
            traced = function.trace(state, self.rows, self.rows)
        self.choices[f"{part}-{backend}"] = sorted(set(map(str, choices)))
        return traced.lower(), state


def compile_programs(
    inputs: Inputs, wanted: Sequence[Key]
) -> Iterator[tuple[Key, Callable[[], Program]]]:
    """Each of `wanted` with a function that returns it compiled, or raises what went wrong.

    All are compiled side by side; once the iterator is at its end, nothing compiles any more.
    """
    with Compiler() as compiler:
        started = {key: _start(inputs, key, compiler) for key in wanted}
        for key, start in started.items():

            def program(key: Key = key, start: Callable[[], tuple[Any, Any]] = start) -> Program:
                compiled, state = start()
                return Program(compiled, state, inputs.rows, key[0] == "step")

            yield key, program


def _start(inputs: Inputs, key: Key, compiler: Compiler) -> Callable[[], tuple[Any, Any]]:
    """Begins to compile; returns a function that waits for it, or raises what went wrong."""
    try:
        lowered, state = inputs.lower(*key)
    except Exception as error:
        future: Future[Any] = Future()
        future.set_exception(error)
        return lambda: (future.result(), None)
    future = compiler.submit(lowered, by_xla=True)
    return lambda: (future.result(), state)
