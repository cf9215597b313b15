"""Calls of collectives on given arrays, and what they must give, bit for bit."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


def per_device(call, *arrays, devices=None, axis="x", mesh=None):
    """Calls `call` on each device with its entry of each array; returns what all of them got."""
    mesh = mesh or cases.mesh_of(devices or len(arrays[0]))
    spec = P(axis)

    def mapped(*xs):
        return jax.tree.map(lambda x: x[None], call(*[x[0] for x in xs]))

    program = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(program)(*arrays))


def drawn(shape, dtype, seed=0):
    """Small whole numbers: no two devices hold the same, and sums of them are exact."""
    dtype = jnp.dtype(dtype)
    least, most = {"bool": (0, 1), "int2": (-2, 1), "float4_e2m1fn": (-4, 4)}.get(
        str(dtype), (0 if str(dtype).startswith("uint") else -6, 6)
    )
    generator = np.random.default_rng(seed)
    values = generator.integers(least, most, shape, endpoint=True)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * generator.integers(least, most, shape, endpoint=True)
    return values.astype(dtype)


def same_bits(got, want):
    want = np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()
