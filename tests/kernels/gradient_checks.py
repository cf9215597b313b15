"""Derivatives of the fused matmuls, found right or wrong on the devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import subjects
from fused_cases import BF16, F32
from jax.sharding import Mesh
from subjects import Sizes


def gradients(name: str, mesh: Mesh, sizes: Sizes) -> Callable:
    """A program (seed) -> largest errors of both gradients on every device, the kernel's and XLA's.

    `[2, 2]`: (kernel, XLA) x (lhs, rhs), relative to the largest element of the gradient.
    """
    subject = subjects.SUBJECTS[name]
    shapes = subject.shapes(mesh.size, sizes)

    def body(seed):
        operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=False)

        def gradient(call):
            def loss(lhs, rhs):
                out = call(lhs, rhs).astype(F32)
                return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape))

            return jax.grad(loss, (0, 1))(*(x.astype(F32) for x in operands))

        def by(backend):
            def call(lhs, rhs):
                return subject.call([lhs.astype(BF16), rhs.astype(BF16)], "x", backend=backend)

            return gradient(call)

        exact = gradient(lambda lhs, rhs: subject.exact([lhs, rhs], "x"))
        return jnp.stack(
            [
                jnp.stack([jnp.abs(g - e).max() / jnp.abs(e).max() for g, e in pairs])
                for pairs in (zip(by(b), exact, strict=True) for b in ("pallas", "xla"))
            ]
        )

    return subjects.on_mesh(body, mesh)
