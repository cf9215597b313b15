"""The kernel of attention's derivative in the simulator, beside dense attention in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import dense

import stretto as st
from stretto.kernels.engine.hopper.attention.derivative_config import DerivativeTiles
from stretto.kernels.fused import attention_derivative
from stretto.kernels.fused.attention_config import Sequence

ERROR = {"bfloat16": 5e-3, "float16": 7e-4}
"""The most relative error of a derivative."""


class OnOne:
    """The kernel on one device, traced once; called with (operands, mask, seed).

    The operands may end with the segment ids of queries and of keys.
    """

    def __init__(self, sequence: Sequence, config: DerivativeTiles, *, cores: int = 2, **how: Any):
        self.cores = cores

        def body(q, k, v, bar, lse, delta, *ids):
            return attention_derivative.derive(
                *(q, k, v, bar, lse, delta, sequence),
                scale=q.shape[-1] ** -0.5,
                config=config,
                segments=ids or None,
                **how,
            )

        self.program = jax.jit(body)

    def __call__(self, operands: list, mask: np.ndarray, seed: int = 0, **settings: Any) -> Any:
        """(errors of the derivatives by q, k and v, the results, the report)."""
        q, k, v, bar, *ids = operands
        out, lse, *right = dense(operands[:4], mask)
        delta = (out * np.asarray(bar, np.float64)).sum(-1)
        rows = (jnp.asarray(x.transpose(0, 2, 1), jnp.float32) for x in (lse, delta))
        with st.simulate(seed=seed, core_count=self.cores, **settings) as report:
            found = jax.block_until_ready(self.program(q, k, v, bar, *rows, *ids))
        return relative(found, right), found, report


def relative(found: Any, right: Any) -> list[float]:
    """The error of each array, beside its size."""
    pairs = [(np.asarray(x, np.float64), y) for x, y in zip(found, right, strict=True)]
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]
