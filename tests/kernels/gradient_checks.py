"""Derivatives of the operations, found right or wrong on the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import subjects
from fused_cases import BF16, F32
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

        def gradient(call):
            def loss(*operands):
                out = call(operands).astype(F32)
                return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape))

            places = tuple(range(len(operands)))
            return jax.grad(loss, places)(*(x.astype(F32) for x in operands))

        def by(backend):
            def call(operands):
                narrow = [x.astype(BF16) for x in operands]
                return subject.call(narrow, axis, backend=backend)

            return gradient(call)

        exact = gradient(lambda operands: subject.exact(list(operands), axis))
        return jnp.stack(
            [
                jnp.stack([jnp.abs(g - e).max() / jnp.abs(e).max() for g, e in pairs])
                for pairs in (zip(by(b), exact, strict=True) for b in (backend, "xla"))
            ]
        )

    return subjects.on_mesh(body, mesh)
