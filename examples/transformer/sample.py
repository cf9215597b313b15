"""Text from the model, byte by byte.

    python examples/transformer/sample.py checkpoints/tiny-1 --prompt "class "

goes on with a text as the newest checkpoint of a run has learnt it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import config
import jax
import jax.numpy as jnp
import numpy as np
import parallel
from checkpoint import read
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel import Tree
from step import TrainState, state_shapes


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
    places = parallel.in_parts(np.arange(sizes.sequence)[None].repeat(groups, 0), mesh).reshape(-1)
    rows = jnp.asarray(np.argsort(places, stable=True)[::groups])  # of each byte, that of one group

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def generate(weights: Tree, window: jax.Array) -> jax.Array:
        def one_byte(i: jax.Array, carry: tuple) -> tuple:
            window, text = carry
            length = jnp.minimum(len(prompt) + i, sizes.sequence)
            scores = logits(weights, window[places])[rows[length - 1]]
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


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; `argv` is `sys.argv[1:]` where it is None."""
    parser = argparse.ArgumentParser(description="Write text with a model that train.py has made.")
    parser.add_argument("run", type=Path, metavar="FOLDER", help="of a run: checkpoints/tiny-1")
    parser.add_argument("--prompt", default="def ", help="what the text begins with")
    parser.add_argument("--count", type=int, default=200, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints the prompt and what follows; on as many devices as the heads can be split over."""
    args = parse_arguments(argv)

    def sizes_of(about: dict[str, Any]) -> config.Sizes:
        names = [field.name for field in dataclasses.fields(config.Sizes)]
        return config.Sizes(**{name: about[name] for name in names})

    def mesh_of(sizes: config.Sizes) -> Mesh:
        return parallel.make_mesh(1, math.gcd(len(jax.devices()), sizes.kv_heads))

    def shapes_of(about: dict[str, Any]) -> TrainState:
        sizes = sizes_of(about)
        any_training = config.Training(steps=1, batch=1, learning_rate=1.0)
        return state_shapes(mesh_of(sizes), sizes, any_training)

    try:
        about, state = read(args.run, shapes_of)
        sizes = sizes_of(about)
        how = config.Execution.suited_to(jax.default_backend(), "auto", about["dtype"])
        text = sample(
            mesh_of(sizes),
            sizes,
            how,
            state.weights,
            prompt=args.prompt.encode(),
            count=args.count,
            temperature=args.temperature,
            seed=args.seed,
        )
    except ValueError as error:
        raise SystemExit(f"sample.py: {error}") from None
    print(text.decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
