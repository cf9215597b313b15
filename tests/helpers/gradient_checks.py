"""Derivatives of the operations, found right or wrong on the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import subjects
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import Mesh
from subjects import Sizes


def gradients(
    name: str, mesh: Mesh, sizes: Sizes, *, axis: Any = "x", backend: str = "pallas"
) -> Callable:
    """A program (seed) -> largest errors of all gradients on every device, the kernel's and XLA's.

    `[2, operands]`: (kernel, XLA) x operands, relative to the largest element of the gradient.
    """
    subject = subjects.SUBJECTS[name]
    shapes = subject.shapes(subjects.team_size(mesh, axis), sizes)

    def body(seed):
        operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=False)

        def gradient(call, operands):
            def loss(*operands):
                out = call(operands)
                weights = jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape)
                # Of the type in which all get it back, so that all begin with the same.
                return jnp.sum(out.astype(F32) * subjects.rounded(weights, BF16).astype(F32))

            # Without the barrier XLA would leave out the rounding that its gradients have.
            places = tuple(range(len(operands)))
            return lax.optimization_barrier(jax.grad(loss, places)(*operands))

        def by(backend):
            return gradient(lambda xs: subject.call(xs, axis, backend=backend), operands)

        wide = [x.astype(F32) for x in operands]
        exact = gradient(lambda xs: subject.exact(list(xs), axis), wide)
        return jnp.stack(
            [
                jnp.stack([jnp.abs(g.astype(F32) - e).max() / jnp.abs(e).max() for g, e in pairs])
                for pairs in (zip(by(b), exact, strict=True) for b in (backend, "xla"))
            ]
        )

    return subjects.on_mesh(body, mesh)
