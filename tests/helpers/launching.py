"""Many launches in one program, with new data each and one device late: on GPUs and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import subjects
from fused_cases import F32
from jax import lax
from jax.sharding import Mesh
from subjects import Sizes, Subject

MICROSECOND = 1e-6


def every_one_verified(
    subject: Subject, mesh: Mesh, sizes: Sizes, *, axis: Any = "x", **options: Any
) -> Callable:
    """A program (seed, calls) -> wrong elements of every device, in all of the calls."""
    options = dict(out_dtype=F32) | options

    def body(seed, calls):
        def step(i, wrong):
            operands = drawn(subject, mesh, sizes, axis, seed, i)
            out = subject.call(operands, axis, **options)
            return wrong + differing(out, subject.exact(operands, axis))

        return lax.fori_loop(0, calls, step, jnp.int32(0))

    return subjects.on_mesh(body, mesh)


def last_one_verified(
    subject: Subject, mesh: Mesh, sizes: Sizes, *, axis: Any = "x", **options: Any
) -> Callable:
    """A program (seed, calls, late device, microseconds) -> wrong elements of every device.

    The calls follow one another with nothing between them but the making of new operands. Before
    the first one the host keeps the late device for so long. Only the last result is looked at.
    """
    options = dict(out_dtype=F32) | options

    def body(seed, calls, late, microseconds):
        hold = held_up(mesh, late, microseconds)

        def operands_of(i):
            operands = drawn(subject, mesh, sizes, axis, seed, i)
            return [jnp.where(hold == 0, x, jnp.zeros_like(x)) for x in operands]

        def exact(i):
            return subject.exact(operands_of(i), axis)

        def step(i, _):
            return subject.call(operands_of(i), axis, **options).astype(F32)

        nothing = jnp.zeros(jax.eval_shape(exact, 0).shape, F32)
        out = lax.fori_loop(0, calls, step, nothing)
        return differing(out, exact(calls - 1))

    return subjects.on_mesh(body, mesh)


def drawn(subject, mesh, sizes, axis, seed, i) -> list[jax.Array]:
    """This device's operands of the `i`-th call: whole numbers."""
    shapes = subject.shapes(subjects.team_size(mesh, axis), sizes)
    return subject.draw(subjects.own_key(seed, mesh, i), shapes, whole=True)


def differing(out: jax.Array, exact: jax.Array) -> jax.Array:
    """Elements of `out` that are not `exact`, which is not rounded."""
    return jnp.sum(out.astype(F32) != exact, dtype=jnp.int32)


def held_up(mesh: Mesh, late: jax.Array, microseconds: jax.Array) -> jax.Array:
    """0, which comes late to the `late`-th device of the mesh."""

    def wait(device, late, microseconds):
        if int(device) == int(late):
            time.sleep(int(microseconds) * MICROSECOND)
        return np.float32(0)

    shape = jax.ShapeDtypeStruct((), F32)
    return jax.pure_callback(wait, shape, lax.axis_index(mesh.axis_names), late, microseconds)
