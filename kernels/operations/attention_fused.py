"""Attention by Stretto's own kernel, which pulls the peers' keys and values itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.distributed.private_jax import cuda_version
from stretto.distributed.private_jax.cudnn_attention import derived_once
from stretto.distributed.team import Team
from stretto.kernels.attention.layouts import ZIGZAG
from stretto.kernels.attention.masks import Mask
from stretto.kernels.attention.peers import Bars, Keys
from stretto.kernels.attention.shares import Share
from stretto.kernels.fused import attention, attention_config, attention_derivative
from stretto.kernels.fused.attention_config import Config, Sequence
from stretto.kernels.operation import Call
from stretto.kernels.operations import attention_examples as examples
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem


def sequence_of(mask: Mask, layout: str, devices: int) -> Sequence:
    """How tokens lie in it: without a causal mask their places make no difference."""
    is_cut = mask.causal and layout == ZIGZAG and devices > 1
    return Sequence(chunks=2 if is_cut else 1, causal=mask.causal, window=mask.window)


def obstacle(
    q: jax.Array,
    k: jax.Array,
    config: Config,
    *,
    mask: Mask,
    layout: str,
    devices: int,
    segments: Collection[str],
    scale: float,
) -> str | None:
    """Why the kernel cannot serve such a call; None if it can.

    Args:
      q, k: queries and keys of a device.
      config: of the kernel.
      mask, layout, scale: as the public operation has them.
      devices: that hold the sequence.
      segments: the types of segment ids, if tokens belong to documents.
    """
    if segments and np.result_type(*segments).itemsize > 4:
        return (
            "the kernel takes segment ids that a type of 32 bits holds, not"
            f" {' and '.join(dict.fromkeys(segments))}."
        )
    if not 0 < scale < math.inf:
        return f"the kernel needs a finite scale above 0, not {scale}."
    sequence = sequence_of(mask, layout, devices)
    return attention_config.obstacle(q, k.shape[1], sequence.chunks, config.tiles)


def not_derived(q: jax.Array, k: jax.Array, config: Config, sequence: Sequence) -> str | None:
    """Why the kernel does not derive as well; None if it does.

    Args:
      q, k: queries and keys of a device.
      config: of the kernel.
      sequence: how tokens lie in it.
    """
    if config.backward != attention_config.KERNEL:
        return f"the configuration has backward={config.backward!r}."
    return attention_derivative.obstacle(q, k.shape[1], sequence.chunks)


def derivation(
    operands: Any, share: Share, out_bar: jax.Array, lse_bar: jax.Array | None, call: Call
) -> Callable[[Keys, int], Bars] | None:
    """(keys, distance along the axes) -> derivatives of the share of these keys, by the kernel.

    Those of keys and values are of the own ones, by the queries of the device at the same distance
    the other way. None where another implementation derives.
    """
    if not isinstance(call.config, Config):
        return None
    options, devices = call.options, axis_size(call.axes)
    sequence = sequence_of(options.mask, options.layout, devices)
    if not_derived(operands.q, operands.k, call.config, sequence) is not None:
        return None
    delta = jnp.einsum("bthd,bthd->bht", share.out, out_bar, preferred_element_type=share.lse.dtype)
    if lse_bar is not None:
        delta -= lse_bar

    def derive(keys: Keys, distance: int) -> Bars:
        def run(
            q: jax.Array, k: jax.Array, v: jax.Array, bar: jax.Array, lse: jax.Array, *rest: Any
        ) -> Bars:
            delta, *segments = rest
            return attention_derivative.derive(
                *(q, k, v, bar, lse, delta, sequence),
                scale=options.scale,
                team=Team.along(call.axes),
                distance=distance,
                segments=(segments[0], segments[1]) if segments else None,
                interpret=call.interpret,
            )

        given = operands.q, keys.k, keys.v, out_bar, share.lse, delta
        if operands.segments is None or keys.segments is None:
            return derived_once(run)(*given)
        segments = (x.astype(jnp.int32) for x in (operands.segments, keys.segments))
        return derived_once(run)(*given, *segments)

    return derive


def candidates(problem: Problem) -> Iterator[Config]:
    """What the tuner tries of the kernel, for a problem that it can serve."""
    if of_machine(problem) is not None:
        return
    sizes, devices = problem.sizes, problem.devices
    shape = sizes["b"], sizes["t"] // devices, sizes["heads"], sizes["dim"]
    q = jax.ShapeDtypeStruct(shape, problem.types.lhs)
    chunks = 2 if sizes["masking"] == examples.ZIGZAG and devices > 1 else 1
    fitting = [
        config
        for config in Config.candidates(problem)
        if attention_config.obstacle(q, sizes["kv_t"] // devices, chunks, config.tiles) is None
    ]
    yield from fitting
    if sizes["passes"] == examples.BOTH:
        for config in fitting:
            yield dataclasses.replace(config, backward=attention_config.CUDNN)


def default(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    return attention_config.config_for(problem.sizes["dim"])


def attend(operands: Any, call: Call) -> tuple[Share, attention.Pair | None]:
    """(attention of the device's queries to all keys, the peers' keys if they are to be kept)."""
    options, team = call.options, Team.along(call.axes)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> Any:
        return attention.attend_and_keep(
            *(q, k, v),
            team,
            sequence_of(options.mask, options.layout, team.size),
            scale=options.scale,
            config=call.config,
            segments=(segments[0], segments[1]) if segments else None,
            interpret=call.interpret,
        )

    given = operands.q, operands.k, operands.v, *(_documents(operands, call) or ())
    out, lse, kept = derived_once(run)(*given)
    return Share(out, lse), kept if call.config.keep else None


def _documents(operands: Any, call: Call) -> attention.Pair | None:
    """The documents of the queries, and those of all keys as the kernel takes them."""
    if operands.segments is None:
        return None
    every = lax.all_gather(operands.kv_segments.astype(jnp.int32), call.axes)
    every = jnp.roll(every, -lax.axis_index(call.axes), axis=0)
    return operands.segments.astype(jnp.int32), every


def kept_keys(
    kept: attention.Pair, operands: Any, call: Call, *, all_are_read: bool
) -> Iterator[tuple[int, Any, Keys]]:
    """(distance along the axes, the peer, its keys) of what `attend` kept.

    Chunks that no query sees never arrived. If `all_are_read`, also these, they are zeros: weights
    of 0 times what is no number would be none.
    """
    options, device, devices = call.options, lax.axis_index(call.axes), axis_size(call.axes)
    batch, keys, kv_heads, dim = operands.k.shape
    sequence = sequence_of(options.mask, options.layout, devices)
    sizes = attention_config.Sizes.of(operands.q, operands.k, devices, sequence, call.config)
    visible = dataclasses.replace(sizes.visible, device=device)
    chunks = sequence.chunks
    shape = batch, chunks, keys // chunks, kv_heads, dim
    documents = _documents(operands, call)
    for distance in range(1, devices):
        pair = [x[distance - 1].reshape(shape) for x in kept]
        if sequence.causal and all_are_read:
            seen = [visible.is_seen(distance * chunks + chunk) for chunk in range(chunks)]
            pair = [jnp.where(jnp.stack(seen)[:, None, None, None], x, 0) for x in pair]
        k, v = (x.reshape(operands.k.shape) for x in pair)
        # In their own type: that of the queries' ids, beside which they may be compared in 64 bits.
        ids = (
            None if documents is None else documents[1][distance].astype(operands.kv_segments.dtype)
        )
        yield distance, (device + distance) % devices, Keys(k, v, ids)


def of_machine(problem: Problem) -> str | None:
    """Why the kernel cannot run on such devices; None if it can."""
    if problem.machine.architecture != HOPPER:
        return "method 'fused' is built for Hopper GPUs."
    return cuda_version.miscompiles_attention()
