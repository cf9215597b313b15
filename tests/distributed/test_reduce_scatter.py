"""Reduce-scatters on CPUs as parts of sums: the same numbers, and none is left in a program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax, numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from stretto.distributed.private_jax import reduce_scatter

mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
data = np.random.default_rng(0).integers(-9, 9, (8, 8, 16)).astype(np.float32)
calls = {
    "tiled": lambda a: lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True),
    "untiled": lambda a: lax.psum_scatter(a[:, :4], "y", scatter_dimension=1),
    "both axes": lambda a: lax.psum_scatter(a, ("x", "y"), scatter_dimension=2, tiled=True),
    "derivative": lambda a: jax.grad(
        lambda b: (lax.all_gather(b, "y", axis=1, tiled=True) ** 2).sum())(a),
}

def on_mesh(call, vma):
    spec = P(("x", "y"))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=vma))

def results():
    out = {}
    for name, call in calls.items():
        for vma in (False, True):
            program = on_mesh(call, vma)
            text = program.lower(data).as_text()
            out[name, vma] = np.asarray(program(data)), "reduce_scatter" in text
    one = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))
    groups = [[0, 3, 5, 6], [7, 1, 2, 4]]
    grouped = jax.jit(jax.shard_map(
        lambda a: lax.psum_scatter(a, "z", scatter_dimension=1, tiled=True,
                                   axis_index_groups=groups),
        mesh=one, in_specs=P("z"), out_specs=P("z"), check_vma=False))
    out["groups"] = np.asarray(grouped(data)), "reduce_scatter" in grouped.lower(data).as_text()
    return out

before = results()
jax.config.update("jax_cpu_collectives_implementation", "mpi")
print(reduce_scatter.make_of_sums())
jax.config.update("jax_cpu_collectives_implementation", "gloo")
print(reduce_scatter.make_of_sums())
jax.clear_caches()
after = results()
print(all(np.array_equal(before[key][0], after[key][0]) for key in before))
print([scatters for _, scatters in before.values()])
print([scatters for _, scatters in after.values()])
"""


@pytest.mark.timeout(200)
def test_the_same_numbers_without_a_reduce_scatter():
    """In a process of its own: what is registered with JAX stays."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    environ.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "True", "True", str([True] * 9), str([False] * 9)]
