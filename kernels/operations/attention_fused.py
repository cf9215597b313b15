"""Attention by Stretto's own kernel, which pulls the peers' keys and values itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from stretto.distributed.private_jax import cuda_version
from stretto.distributed.team import Team
from stretto.kernels.attention.layouts import ZIGZAG
from stretto.kernels.attention.masks import Mask
from stretto.kernels.attention.shares import Share
from stretto.kernels.fused import attention, attention_config
from stretto.kernels.fused.attention_config import Config
from stretto.kernels.operation import Call
from stretto.kernels.operations import attention_examples as examples
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem


def sequence_of(mask: Mask, layout: str, devices: int) -> attention_config.Sequence:
    """How tokens lie in it: without a causal mask their places make no difference."""
    is_cut = mask.causal and layout == ZIGZAG and devices > 1
    return attention_config.Sequence(
        chunks=2 if is_cut else 1, causal=mask.causal, window=mask.window
    )


def obstacle(
    q: jax.Array,
    k: jax.Array,
    config: Config,
    *,
    mask: Mask,
    layout: str,
    devices: int,
    segments: bool,
    scale: float,
) -> str | None:
    """Why the kernel cannot serve such a call; None if it can.

    Args:
      q, k: queries and keys of a device.
      config: of the kernel.
      mask, layout, scale: as the public operation has them.
      devices: that hold the sequence.
      segments: whether tokens belong to documents.
    """
    if segments:
        return "the kernel is not built for segment ids."
    if not scale > 0:
        return f"the kernel needs a scale above 0, not {scale}."
    sequence = sequence_of(mask, layout, devices)
    return attention_config.obstacle(q, k.shape[1], sequence.chunks, config.tiles)


def candidates(problem: Problem) -> Iterator[Config]:
    """What the tuner tries of the kernel, for a problem that it can serve."""
    if of_machine(problem) is not None:
        return
    sizes, devices = problem.sizes, problem.devices
    shape = sizes["b"], sizes["t"] // devices, sizes["heads"], sizes["dim"]
    q = jax.ShapeDtypeStruct(shape, problem.types.lhs)
    chunks = 2 if sizes["masking"] == examples.ZIGZAG and devices > 1 else 1
    for config in Config.candidates(problem):
        if attention_config.obstacle(q, sizes["kv_t"] // devices, chunks, config.tiles) is None:
            yield config


def attend(operands: Any, call: Call) -> Share:
    """Attention of the device's queries to all keys."""
    options, team = call.options, Team.along(call.axes)
    out, lse = attention.attend(
        *(operands.q, operands.k, operands.v),
        team,
        sequence_of(options.mask, options.layout, team.size),
        scale=options.scale,
        config=call.config,
        interpret=call.interpret,
    )
    return Share(out, lse)


def of_machine(problem: Problem) -> str | None:
    """Why the kernel cannot run on such devices; None if it can."""
    if problem.machine.architecture != HOPPER:
        return "method 'fused' is built for Hopper GPUs."
    return cuda_version.miscompiles_attention()
