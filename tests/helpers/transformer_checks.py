"""The transformer on a mesh and on one device, on the same bytes and weights: for its tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import config
import data
import jax
import numpy as np
import parallel
import reference
from step import TrainState, make_optimizer, make_train_step, state_shardings

TRAINING = config.Training(steps=100, batch=4, learning_rate=3e-3)
TEXT = data.Corpus(*[np.frombuffer(Path(__file__).read_bytes(), np.uint8)] * 2, digest="")


def random_bytes(sizes: config.Sizes, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.integers(config.VOCABULARY, size=(batch, sizes.sequence + 1)).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def random_weights(sizes: config.Sizes) -> parallel.Tree:
    """Normal weights of every size, the norms' scales around one; numpy, float32."""
    _, shapes, _ = parallel.structure(sizes)
    rng = np.random.default_rng(4)

    def draw(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        is_norm = "norm" in path[-1].key
        mean, std = (1, 0.3) if is_norm else (0, sizes.hidden**-0.5)
        return rng.normal(mean, std, shape.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def put(mesh: jax.sharding.Mesh, sizes: config.Sizes, weights: parallel.Tree) -> parallel.Tree:
    return jax.device_put(weights, parallel.shardings(mesh, parallel.structure(sizes)[2]))


def on_mesh(dp: int, tp: int, sizes: config.Sizes, how: config.Execution, batch: int, cp: int = 1):
    """(loss, gradients) of the first devices, as numpy."""
    mesh = parallel.make_mesh(dp, tp, cp)
    rows = [parallel.put_rows(mesh, x) for x in random_bytes(sizes, batch)]
    function = jax.jit(parallel.loss_and_gradients(mesh, sizes, how))
    weights = put(mesh, sizes, random_weights(sizes))
    return jax.tree.map(np.asarray, function(weights, *rows))


def on_one_device(sizes: config.Sizes, dtype: str, batch: int):
    """(loss, gradients) of the model in plain JAX, as numpy; float32 is not rounded on GPUs."""
    function = jax.jit(jax.value_and_grad(lambda w, *rows: reference.loss(w, *rows, sizes, dtype)))
    with jax.default_matmul_precision("highest"):
        found = function(random_weights(sizes), *random_bytes(sizes, batch))
    return jax.tree.map(np.asarray, found)


def differences(gradients: parallel.Tree, expected: parallel.Tree) -> dict[str, float]:
    """By weight: the largest difference, as a share of the largest expected value."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    found = jax.tree.leaves(gradients)
    return {
        jax.tree_util.keystr(path): float(np.abs(x - y).max() / np.abs(y).max())
        for (path, y), x in zip(paths, found, strict=True)
    }


def train(
    step, mesh: jax.sharding.Mesh, sizes: config.Sizes, training: config.Training
) -> list[float]:
    """The losses of all steps."""
    weights = put(mesh, sizes, random_weights(sizes))
    where = state_shardings(mesh, sizes, training)
    init = jax.jit(make_optimizer(training).init, out_shardings=where.optimizer)
    state = TrainState(jax.device_put(np.int32(0), where.step), weights, init(weights))
    losses = []
    for number in range(training.steps):
        rows = data.training_batch(TEXT, number, training.batch, sizes.sequence, training.seed)
        state, loss = step(state, *(parallel.put_rows(mesh, x) for x in rows))
        losses.append(float(loss))
    return losses


def check_fused_training(mesh: jax.sharding.Mesh, sizes: config.Sizes, backend: str) -> None:
    """As near to what float32 gives as XLA's collectives in 16 bits are, over a hundred steps."""
    training = dataclasses.replace(TRAINING, batch=mesh.shape["dp"])
    losses = {}
    for key in (("xla", "float32"), ("xla", "bfloat16"), (backend, "bfloat16")):
        step = make_train_step(
            mesh, sizes, training, config.Execution(backend=key[0], dtype=key[1])
        )
        with jax.default_matmul_precision("highest"):
            losses[key] = np.array(train(step, mesh, sizes, training))
    exact, plain, fused = losses.values()
    assert np.abs(fused - exact).max() <= 2 * np.abs(plain - exact).max() + 1e-3
    assert (fused != plain).any()
    assert np.mean(fused[-10:]) < fused[0] - 1.5  # it learns
