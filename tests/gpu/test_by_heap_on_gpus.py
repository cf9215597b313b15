"""Collectives through the heap: many sizes in one program, and a recorded program run again."""

from __future__ import annotations

import functools
import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.collectives import by_heap, summed_norm_by_heap

pytestmark = pytest.mark.gpu(2)


def whole_numbers(shape, seed):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def mapped(call, mesh):
    """`call` on each device's entry; what all of them got."""
    return jax.shard_map(
        lambda *xs: jax.tree.map(lambda y: y[None], call(*[x[0] for x in xs])),
        mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
    )  # fmt: skip


def test_sizes_in_turn_beside_kernels_that_read_their_peers(mesh, scale, tally) -> None:
    """Neighbours take other halves of the same memory, for messages of other sizes."""
    rng = random.Random(0)
    sizes = [
        rng.choice((1, 100, 2000, 70_000, 300_000)) for _ in range(4 if scale.rehearsed else 24)
    ]
    config = by_heap.Config()

    def call(*xs):
        sums = [
            st.all_reduce(x, "x", backend=scale.backend, config=config if i % 3 else None)
            for i, x in enumerate(xs)
        ]
        return sums, [st.all_gather(x, "x", backend=scale.backend, config=config) for x in xs]

    xs = [whole_numbers((mesh.size, n), seed) for seed, n in enumerate(sizes)]
    program = jax.jit(mapped(call, mesh))
    for _ in range(3):
        sums, parts = jax.tree.map(np.asarray, program(*xs))
        for x, total, gathered in zip(xs, sums, parts, strict=True):
            for device in range(mesh.size):
                np.testing.assert_array_equal(total[device], x.sum(0))
                np.testing.assert_array_equal(gathered[device], x.reshape(-1))
    tally.checks(6 * len(xs) * mesh.size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_a_bare_message_must_not_send_as_they_are(mesh, scale, tally, dtype) -> None:
    """NaNs of 32 ones, whose inverse is the zero of unread memory; and zeros of either sign."""
    size = 5000 if scale.rehearsed else 70_000
    xs = whole_numbers((mesh.size, size), 0).astype(dtype)
    xs[:, ::3] = 0
    xs[0, 1::3] = -0.0
    words = xs.view(f"uint{8 * xs.itemsize}")
    words[0, 100:900] = words[-1, 1000:1100] = np.iinfo(words.dtype).max
    call = functools.partial(
        st.all_reduce, axis_name="x", backend=scale.backend, config=by_heap.Config()
    )
    program = jax.jit(mapped(call, mesh))
    want = xs.astype(np.float32).sum(0)
    for _ in range(3):
        found = np.asarray(program(xs)).astype(np.float32)
        for device in range(mesh.size):
            np.testing.assert_array_equal(found[device], want)
    tally.checks(3 * mesh.size)


def test_a_recorded_program_run_again(mesh, scale, tally) -> None:
    """Each run has other numbers in other buffers, and another flag."""
    config = summed_norm_by_heap.Config()
    norm = functools.partial(st.all_reduce_rms_norm, axis_name="x", epsilon=1e-6, config=config)

    @st.recorded
    @functools.partial(mapped, mesh=mesh)
    def step(x):
        for _ in range(5):
            x = st.all_reduce(x, "x", config=by_heap.Config())
        return x, norm(x, x * 0, x[0] * 0 + 1)[0]

    for seed in range(2 if scale.rehearsed else 30):
        x = whole_numbers((mesh.size, 6, 512), seed)
        summed, residual = map(np.asarray, step(x))
        want = x.sum(0) * float(mesh.size) ** 4
        for device in range(mesh.size):
            np.testing.assert_array_equal(summed[device], want)
            np.testing.assert_array_equal(residual[device], want * mesh.size)
        tally.checks(2 * mesh.size)
