"""Versions of an operation over several nodes: ours, XLA's flat and hierarchical ones, its parts.

All run inside `shard_map` over the axes `NODE` and `GPU`, on a device's blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

import stretto as st
from stretto.benchmarks.shapes import MATMULS, Shape
from stretto.kernels import reference
from stretto.kernels.nodes import Config

NODE, GPU = "node", "gpu"
BOTH = (NODE, GPU)
FLAT, HIERARCHY, ALONE = "XLA flat", "XLA hierarchical", "matmul alone"
LINK = 300e3  # NVLink's bytes in a microsecond

type Version = Callable[..., jax.Array]
type Block = tuple[int, int]


def blocks(op: str, shape: Shape, devices: int) -> tuple[Block, ...]:
    """Shapes of a device's operands."""
    m, k, n = shape.m, shape.k, shape.n
    if op == "all_gather_matmul":
        return (m // devices, k), (k, n // devices)
    if op in MATMULS:
        return (m, k // devices), (k // devices, n)
    return ((m // devices, n) if op == "all_gather" else (m, n),)


def check_divides(op: str, shape: Shape, devices: int) -> None:
    """Raises ValueError unless every device's part of a problem is as large as the others'."""
    split = {"m": shape.m}
    if op == "all_gather_matmul":
        split["n"] = shape.n
    elif op in MATMULS:
        split["k"] = shape.k
    for name, size in split.items():
        if size % devices:
            raise ValueError(
                f"{op} {shape}: {name}={size} must be a multiple of the job's {devices} devices;"
                " pass another shape."
            )


def expected_us(op: str, shape: Shape, devices: int) -> float:
    """A rough time, in microseconds, to choose how many calls to time at once."""
    arithmetic = 2 * shape.m * shape.k * shape.n / devices / 6e8 if op in MATMULS else 0.0
    rows = shape.k if op == "all_gather_matmul" else shape.n
    return max(arithmetic, 2 * shape.m * rows / LINK) + 50.0


def versions(
    op: str, shape: Shape, devices: int, backend: str, pieces: Sequence[int]
) -> Iterator[tuple[str, Version, tuple[Block, ...]]]:
    """(name, version, shapes of a device's operands) of all that are timed."""
    own = blocks(op, shape, devices)
    yield FLAT, functools.partial(getattr(st, op), axis_name=BOTH, backend="xla"), own
    yield HIERARCHY, _HIERARCHICAL[op], own
    if op in MATMULS:
        lhs, rhs = own
        yield ALONE, _matmul, ((shape.m, lhs[1]), rhs)
    for count in pieces if backend != "xla" else (1,):  # XLA's moves in one.
        config = None if backend == "xla" else Config(pieces=count)
        ours = functools.partial(getattr(st, op), axis_name=BOTH, backend=backend, config=config)
        yield f"Stretto, {count} pieces", ours, own


def _matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return reference.matmul(lhs, rhs).astype(lhs.dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    """Between nodes first, which carries each byte once, and then within them."""
    across = lax.all_gather(x, NODE)
    within = lax.all_gather(across, GPU)
    return jnp.swapaxes(within, 0, 1).reshape(-1, x.shape[1])


def _reduce_scatter(x: jax.Array) -> jax.Array:
    """Within nodes first, so that a node's sum crosses."""
    parts = x.reshape(lax.axis_size(NODE), lax.axis_size(GPU), -1, x.shape[1])
    within = reference.reduce_scatter(parts, GPU, axis=1)
    return reference.reduce_scatter(within, NODE, axis=0)[0, 0]


def _all_reduce(x: jax.Array) -> jax.Array:
    within = reference.reduce_scatter(x, GPU, axis=0)
    return lax.all_gather(lax.psum(within, NODE), GPU, tiled=True)


def _all_gather_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _matmul(_all_gather(lhs), rhs)


def _matmul_reduce_scatter(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _reduce_scatter(_matmul(lhs, rhs))


def _matmul_all_reduce(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _all_reduce(_matmul(lhs, rhs))


_HIERARCHICAL: dict[str, Version] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}
