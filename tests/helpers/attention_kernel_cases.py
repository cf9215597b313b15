"""The attention kernel in the simulator, beside dense attention in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import dense
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.team import Team
from stretto.kernels.engine.hopper.attention.config import AttentionTiles
from stretto.kernels.fused import attention
from stretto.kernels.fused.attention_config import Config, Sequence

SMALL = Config(tiles=AttentionTiles(tile_k=64), pull_slots=2)
"""Blocks of 64 keys, so that a few keys are several blocks."""
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


def drawn(q_shape, kv_shape, dtype="bfloat16", size=1.0) -> list[jax.Array]:
    """q, k, v and a cotangent of the result; q of this size."""
    rng = np.random.default_rng(0)
    q, bar = rng.normal(size=(2, *q_shape))
    k, v = rng.normal(size=(2, *kv_shape))
    return [jnp.asarray(x, dtype) for x in (size * q, k, v, bar)]


def seen(batch, queries, keys, *, causal=False, window=None):
    """bool `[batch, queries, keys]`."""
    distance = np.arange(queries)[:, None] - np.arange(keys)
    found = (distance >= 0) | (not causal)
    if window is not None:
        found &= distance < window
    return np.broadcast_to(found, (batch, queries, keys))


def check(found, operands, mask) -> None:
    """Result and logsumexp `[batch, heads, tokens]`."""
    out, lse, *_ = dense(operands, mask)
    tolerance = TOLERANCE[str(operands[0].dtype)]
    np.testing.assert_allclose(found[0], out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[1], lse.transpose(0, 2, 1), rtol=1e-4, atol=1e-4)


class Simulated:
    """The kernel on some devices, traced once; called with (operands, seed).

    If `packed`, the operands end with the segment ids of queries and of keys.
    """

    def __init__(
        self,
        devices: int,
        sequence: Sequence,
        config: Config = SMALL,
        cores: int = 2,
        *,
        packed: bool = False,
    ):
        self.devices, self.sequence, self.cores = devices, sequence, cores

        def body(q, k, v, *ids):
            team = Team.along(("x",))
            if ids:
                every = jnp.roll(jax.lax.all_gather(ids[1], "x"), -team.device_id(), axis=0)
            return attention.attend(
                *(q, k, v),
                team,
                sequence,
                scale=q.shape[-1] ** -0.5,
                config=config,
                segments=(ids[0], every) if ids else None,
            )

        tokens = P(None, "x")
        mapped = jax.shard_map(
            body,
            mesh=mesh_of(devices),
            in_specs=(tokens,) * (5 if packed else 3),
            out_specs=(tokens, P(None, None, "x")),
        )
        self.program = jax.jit(mapped)

    def __call__(self, operands: list, seed: int = 0, **settings: Any) -> tuple[list, Any]:
        """(result and logsumexp of the whole sequence, the report)."""
        is_cut = self.sequence.chunks > 1
        if is_cut:
            operands = [st.to_zigzag(x, self.devices) for x in operands]
        with st.simulate(seed=seed, core_count=self.cores, **settings) as report:
            out, lse = jax.block_until_ready(self.program(*operands))
        if is_cut:
            out, lse = (
                st.from_zigzag(out, self.devices),
                st.from_zigzag(lse, self.devices, axis=2),
            )
        return [np.asarray(x, np.float64) for x in (out, lse)], report


class WithoutWaitFor:
    """`plgpu` whose waits for one kind of barriers do nothing."""

    def __init__(self, module, barriers):
        self.module, self.barriers = module, barriers

    def __getattr__(self, name):
        return getattr(self.module, name)

    def barrier_wait(self, barrier):
        if not any(getattr(barrier, "ref", barrier) is left_out for left_out in self.barriers):
            self.module.barrier_wait(barrier)
