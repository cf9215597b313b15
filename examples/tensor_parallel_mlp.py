"""Train a two-layer network on handwritten digits, with its weights split over all devices.

    stretto run -n 4 examples/tensor_parallel_mlp.py

The network is `gelu(images @ w1) @ w2`. On D devices (this is tensor parallelism, with activations
that are split by rows between the layers, as in Megatron's sequence parallelism):

    array     whole shape        one device's shard
    images    [batch, pixels]    [batch / D, pixels]     rows
    w1        [pixels, hidden]   [pixels, hidden / D]    columns
    w2        [hidden, classes]  [hidden / D, classes]   rows
    logits    [batch, classes]   [batch / D, classes]    rows

The first layer needs every row of the images, so it gathers them; the second leaves every device
with a partial sum, so it reduces them. Stretto does each in one kernel with the matmul next to it.
Everything else here is plain JAX, and the same training on one device runs beside it to compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import stretto as st
from stretto.distributed import compiling
from stretto.distributed.simulating import is_simulating

PIXELS, HIDDEN, CLASSES = 64, 512, 16  # ten digits, padded to a multiple of 8
BATCH = 128
TRAIN, TEST = 11 * BATCH, 3 * BATCH  # of 1,797 images
LEARNING_RATE, MOMENTUM = 0.1, 0.9


class Data(NamedTuple):
    """Images in rows, with values from 0 to 1, and their digits; training images in batches."""

    images: jax.typing.ArrayLike  # [TRAIN / BATCH, BATCH, PIXELS]
    labels: jax.typing.ArrayLike  # [TRAIN / BATCH, BATCH]
    test_images: jax.typing.ArrayLike  # [TEST, PIXELS]
    test_labels: jax.typing.ArrayLike  # [TEST]


class Weights(NamedTuple):
    """Both layers' weights, in float32."""

    w1: jax.typing.ArrayLike  # [PIXELS, HIDDEN]
    w2: jax.typing.ArrayLike  # [HIDDEN, CLASSES]


class Epoch(NamedTuple):
    """Mean loss over an epoch's batches, and accuracy on the test images after it."""

    loss: float
    accuracy: float


# --- The network, on many devices and on one. -----------------------------------------------------


def sharded_logits(images, w1, w2, *, dtype, backend):
    """Each device's rows of the logits, from its rows of the images: runs inside `shard_map`."""
    hidden = st.all_gather_matmul(
        images.astype(dtype), w1.astype(dtype), "x", epilogue=jax.nn.gelu, backend=backend
    )
    return st.matmul_reduce_scatter(
        hidden, w2.astype(dtype), "x", out_dtype=jnp.float32, backend=backend
    )


def plain_logits(images, w1, w2, *, dtype):
    """The same on one device."""
    hidden = jax.nn.gelu(images.astype(dtype) @ w1.astype(dtype))
    return jnp.matmul(hidden, w2.astype(dtype), preferred_element_type=jnp.float32)


def on_mesh(mesh: Mesh, function):
    """`function` of one device's images and weights as one of whole arrays, split over `mesh`."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(P("x", None), P(None, "x"), P("x", None)),
        out_specs=P("x", None),
    )


def print_choice(mesh: Mesh, function) -> None:
    """Says what serves the first operation of `function` on these devices, and why."""

    def show(*operands):
        print(st.explain(function, *operands))
        return operands[0]

    shapes = (BATCH, PIXELS), (PIXELS, HIDDEN), (HIDDEN, CLASSES)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jax.eval_shape(on_mesh(mesh, show), *operands)  # traces, and computes nothing


# --- Training: it does not know on how many devices it runs. --------------------------------------


def train(logits, weights: Weights, data: Data, epochs: int) -> Iterator[Epoch]:
    """Stochastic gradient descent with momentum; `logits(images, w1, w2)` is the network."""

    def loss_of(weights, images, labels):
        log_p = jax.nn.log_softmax(logits(images, *weights))
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))

    def step(state, batch):
        weights, velocity = state
        loss, gradient = jax.value_and_grad(loss_of)(weights, *batch)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - LEARNING_RATE * v, weights, velocity)
        return (weights, velocity), loss

    @jax.jit
    def epoch(state, data):
        state, losses = jax.lax.scan(step, state, (data.images, data.labels))
        predicted = jnp.argmax(logits(data.test_images, *state[0]), axis=1)
        return state, losses.mean(), jnp.mean(predicted == data.test_labels)

    state = (weights, jax.tree.map(jnp.zeros_like, weights))
    for _ in range(epochs):
        state, loss, accuracy = epoch(state, data)
        yield Epoch(float(loss), float(accuracy))


# --- Data and weights. ----------------------------------------------------------------------------


def load_data() -> Data:
    """scikit-learn's digits (8 x 8 pixels), shuffled, the same on every process."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[: TRAIN + TEST]
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return Data(
        images=images[:TRAIN].reshape(-1, BATCH, PIXELS),
        labels=labels[:TRAIN].reshape(-1, BATCH),
        test_images=images[TRAIN:],
        test_labels=labels[TRAIN:],
    )


def first_weights() -> Weights:
    """Normal with variance 1 / fan-in, the same on every process."""
    rng = np.random.default_rng(1)
    return Weights(
        w1=rng.normal(0, PIXELS**-0.5, (PIXELS, HIDDEN)).astype(np.float32),
        w2=rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)).astype(np.float32),
    )


def shard(mesh: Mesh, weights: Weights, data: Data) -> tuple[Weights, Data]:
    """Whole arrays, known to every process, as arrays split over the devices of `mesh`."""

    def put(array, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return (
        Weights(w1=put(weights.w1, None, "x"), w2=put(weights.w2, "x", None)),
        Data(
            images=put(data.images, None, "x", None),
            labels=put(data.labels, None, "x"),
            test_images=put(data.test_images, "x", None),
            test_labels=put(data.test_labels, "x"),
        ),
    )


# --- The command. ---------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; `argv` is `sys.argv[1:]` where it is None."""
    parser = argparse.ArgumentParser(description="Train a tensor-parallel network on digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--backend",
        choices=("auto", "pallas", "xla", "simulator"),
        default="auto",
        help="what serves the two operations: fused kernels (pallas, on GPUs), XLA's collectives,"
        " the faster of the two (auto), or fused kernels on simulated GPUs",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the matmuls' operands (default: bfloat16, or float32 for XLA on CPUs)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains on all devices and prints, beside each epoch, how far one device's training is off."""
    args = parse_arguments(argv)
    process = st.initialize()  # joins the other processes, if there are any

    devices = jax.devices()
    if BATCH % len(devices):
        raise SystemExit(f"{len(devices)} devices must divide the batch of {BATCH} images.")
    if args.backend == "simulator" and process.num_processes > 1:
        raise SystemExit("Simulated GPUs share a process: stretto run --processes-per node.")
    kernels = is_simulating() or compiling.current() is not None  # `stretto simulate`, `compile`
    served_by_xla = args.backend == "xla" or (args.backend == "auto" and not kernels)
    on_cpu = devices[0].platform == "cpu" and served_by_xla
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")  # what kernels take, if there are
    if dtype == "float32":  # GPUs would round operands to TF32
        jax.config.update("jax_default_matmul_precision", "highest")

    mesh = Mesh(np.array(devices), ("x",))
    weights, data = first_weights(), load_data()
    logits = partial(sharded_logits, dtype=dtype, backend=args.backend)
    epochs = train(on_mesh(mesh, logits), *shard(mesh, weights, data), args.epochs)

    if process.process_id != 0:  # only the first process compares and prints
        for _ in epochs:
            pass
        return

    print(f"devices: {len(devices)} x {devices[0].device_kind}, processes: {process.num_processes}")
    print_choice(mesh, logits)
    print("epoch    loss  test accuracy  loss minus one device's", flush=True)
    on_one = train(partial(plain_logits, dtype=dtype), weights, data, args.epochs)
    for number, (epoch, other) in enumerate(zip(epochs, on_one, strict=True), start=1):
        print(
            f"{number:5d}  {epoch.loss:.4f}  {epoch.accuracy:13.1%}"
            f"  {epoch.loss - other.loss:23.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
