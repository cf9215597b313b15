"""Text from the model, byte by byte."""

from __future__ import annotations

from functools import partial

import config
import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import Tree


def sample(
    mesh: Mesh,
    sizes: config.Sizes,
    how: config.Execution,
    weights: Tree,
    *,
    prompt: bytes = b"def ",
    count: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
) -> bytes:
    """`prompt` and `count` bytes that the model would go on with.

    Each byte takes a whole forward pass over a window of `sizes.sequence` bytes, as in training:
    no keys and values are kept. Every process must make the call, and gets the same text.

    Raises:
      ValueError: the prompt is empty, or longer than a window.
    """
    if not 0 < len(prompt) <= sizes.sequence:
        raise ValueError(f"prompt has {len(prompt)} bytes; it must have 1 to {sizes.sequence}.")
    logits = parallel.logits(mesh, sizes, how)
    groups = mesh.shape["dp"]  # each computes the same window

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def generate(weights: Tree, window: jax.Array) -> jax.Array:
        def one_byte(i: jax.Array, carry: tuple) -> tuple:
            window, text = carry
            length = jnp.minimum(len(prompt) + i, sizes.sequence)
            scores = logits(weights, jnp.tile(window, groups))[length - 1]
            key = jax.random.fold_in(jax.random.key(seed), i)
            byte = jax.random.categorical(key, scores / temperature)
            is_full = length == sizes.sequence
            window = jnp.where(is_full, jnp.roll(window, -1), window)
            window = window.at[jnp.where(is_full, length - 1, length)].set(byte)
            return window, text.at[i].set(byte)

        text = jnp.zeros(count, jnp.int32)
        return jax.lax.fori_loop(0, count, one_byte, (window, text))[1]

    window = np.zeros(sizes.sequence, np.int32)
    window[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    return prompt + bytes(np.asarray(generate(weights, window)).astype(np.uint8))
