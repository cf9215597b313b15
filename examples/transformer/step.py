"""One step of training: gradients, then AdamW on weights that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import config
import jax
import jax.numpy as jnp
import optax
import parallel
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import Tree


class TrainState(NamedTuple):
    """All that a run needs to go on; `step` counts the steps that were made."""

    step: Tree  # one int32
    weights: Tree
    optimizer: Tree


def make_optimizer(training: config.Training) -> optax.GradientTransformation:
    """AdamW with clipped gradients and a learning rate that follows from the step."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=training.learning_rate,
        warmup_steps=int(training.warmup * training.steps),
        decay_steps=training.steps,
        end_value=training.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        optax.adamw(
            rate,
            b2=0.95,
            weight_decay=training.weight_decay,
            mask=_is_matrix,
        ),
    )


def state_shardings(mesh: Mesh, sizes: config.Sizes, training: config.Training) -> TrainState:
    """Where every array of a `TrainState` lives: the optimiser's beside the weights' own."""
    _, shapes, specs = parallel.structure(sizes)
    optimizer = make_optimizer(training)
    optimizer_specs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, shapes),
        specs,
        transform_non_params=lambda _: P(),
    )
    return parallel.shardings(mesh, TrainState(P(), specs, optimizer_specs))


def state_shapes(mesh: Mesh, sizes: config.Sizes, training: config.Training) -> TrainState:
    """A `TrainState` of `jax.ShapeDtypeStruct`s with their shardings, nothing allocated."""
    _, shapes, _ = parallel.structure(sizes)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(step, shapes, jax.eval_shape(make_optimizer(training).init, shapes))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings(mesh, sizes, training),
    )


def initial_state(mesh: Mesh, sizes: config.Sizes, training: config.Training) -> TrainState:
    """The state before the first step: the same numbers on every mesh."""
    weights = parallel.initial_weights(mesh, sizes, training.seed)
    where = state_shardings(mesh, sizes, training)
    init = jax.jit(make_optimizer(training).init, out_shardings=where.optimizer)
    step = jax.jit(lambda: jnp.int32(0), out_shardings=where.step)()
    return TrainState(step, weights, init(weights))


def make_train_step(
    mesh: Mesh, sizes: config.Sizes, training: config.Training, how: config.Execution
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """The compiled function (state, tokens, targets) -> (next state, loss); consumes `state`."""
    optimizer = make_optimizer(training)
    loss_and_gradients = parallel.loss_and_gradients(mesh, sizes, how)
    where = state_shardings(mesh, sizes, training)

    def train_step(
        state: TrainState, tokens: jax.Array, targets: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        loss, gradients = loss_and_gradients(state.weights, tokens, targets)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        return TrainState(state.step + 1, weights, optimizer_state), loss

    return jax.jit(train_step, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, P())))


def _is_matrix(weights: Tree) -> Tree:
    """True for what weight decay shrinks: all but the norms' scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, weights)
