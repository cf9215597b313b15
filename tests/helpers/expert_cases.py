"""Routings of a mixture of experts, programs of its operations, and what is right, by numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fused_cases import BF16, F32, mesh_of, whole_numbers
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.problem.routing import Routing

TOKENS, EXPERTS = 6, 8
ALONG = P("x")


def routings(devices: int, seed: int) -> dict[str, np.ndarray]:
    """Of `TOKENS` tokens a device, `[devices * TOKENS, top_k]` each."""
    draw = np.random.default_rng(seed)
    shape = (devices * TOKENS, 3)
    zipf = 1 / np.arange(1, EXPERTS + 1)
    return {
        "any": draw.integers(-1, EXPERTS, shape),  # Also none, and an expert twice.
        "out of range": draw.integers(-5, EXPERTS + 5, shape),
        "zipf": draw.choice(EXPERTS, shape, p=zipf / zipf.sum()),
        "all to one": np.full(shape, 5),
        "none": np.full(shape, -1),
        "none to a device": draw.integers(EXPERTS // devices, EXPERTS, shape)
        if devices > 1
        else np.full(shape, -1),
        "one choice": draw.integers(0, EXPERTS, (shape[0], 1)),
    }


def entries(index: np.ndarray, devices: int) -> list[list[tuple[int, int]]]:
    """The (token, choice) of each row of every device, in their order."""
    tokens = len(index) // devices
    own = EXPERTS // devices
    found: list[list[tuple[int, int]]] = []
    for device in range(devices):
        rows = []
        for expert in range(device * own, (device + 1) * own):
            rows += [
                (t, j) for t in range(devices * tokens) for j in np.flatnonzero(index[t] == expert)
            ]
        found.append(rows)
    return found


def on_devices(
    body: Any, devices: int, count: int, out_specs: Any = ALONG, *, check_vma: bool = False
) -> Any:
    """`body` of operands that lie along the devices."""
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh_of(devices),
            in_specs=(P("x"),) * count,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


def dispatched(devices: int, **options: Any) -> Any:
    """`(x, index)` -> rows and the tables, of which those that all have alike come once."""

    def body(x, index):
        rows, routing = st.expert_dispatch(x, index, "x", num_experts=EXPERTS, **options)
        return rows, routing

    return on_devices(body, devices, 2, (P("x"), Routing(P("x"), P("x"), P(), P(), P())))


def combined(devices: int, **options: Any) -> Any:
    """`(rows, weights, positions)` -> tokens."""
    return on_devices(functools.partial(st.expert_combine, axis_name="x", **options), devices, 3)


def rows_to_combine(
    devices: int, seed: int, width: int, none: float = 0.3, *, tokens: int = 44, top_k: int = 3
) -> tuple[Any, np.ndarray]:
    """Rows, weights and positions, of which a share is none; and the sums.

    By default a device's tokens are five chunks of 8 and a half.
    """
    draw = np.random.default_rng(seed)
    count = devices * tokens * top_k
    positions = draw.permutation(count).reshape(-1, top_k).astype(np.int32)
    positions[draw.random(positions.shape) < none] = -1
    rows, weights = whole_numbers(seed, count, width), np.abs(whole_numbers(1, *positions.shape))
    wanted = np.zeros((len(positions), width), np.float32)
    for (t, j), place in np.ndenumerate(positions):
        if place >= 0:
            wanted[t] += (
                weights[t, j] * rows[place % devices * (count // devices) + place // devices]
            )
    return (jnp.asarray(rows, BF16), jnp.asarray(weights), jnp.asarray(positions)), wanted


class Without:
    """`plgpu` with one of its functions left out."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __getattr__(self, name):
        return (lambda *args, **kwargs: None) if name == self.name else getattr(self.module, name)


def layer_operands(features: int) -> tuple[Any, ...]:
    """x `[tokens, 128]`, their experts, weights, w_in and w_out of two devices, gated."""
    shapes = [(2 * TOKENS, 128), (2 * TOKENS, 3)]
    shapes += [(EXPERTS, 128, 2 * features), (EXPERTS, features, 128)]
    drawn = (jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate(shapes))
    x, weights, w_in, w_out = (y.astype(BF16) for y in drawn)
    return x, jnp.asarray(routings(2, 2)["any"], jnp.int32), weights.astype(F32), w_in, w_out


def simulated_layer(config: Any, program: Any, *given: Any, seed: int = 0) -> tuple[Any, int]:
    """What `program(layer)` is of what is given, simulated on two devices; and the launches."""

    def body(*operands):
        return st.mixture_of_experts(*operands, "x", config=config)[0]

    with st.simulate(core_count=4, seed=seed) as report:
        run = jax.jit(program(on_devices(body, 2, 5)))
        found = jax.tree.map(np.asarray, run(*given))
    assert report.ok, str(report)
    return found, report.launches
