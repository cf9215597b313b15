"""The computation of `context_parallel_attention` and its derivative, for each way to move arrays.

| method | sent, forward | sent, backward |
|---|---|---|
| gather | k and v, to all | k and v again, their derivatives to their owners |
| heads | q, k, v: tokens for heads; the result back | the result's cotangent; those of q, k, v |
| fused | k and v, pulled during attention (`fused.attention`) | if k and v are kept, their derivatives only, by the kernel that makes them (`fused.attention_derivative`); else as gather |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.attention import blockwise, cudnn
from stretto.kernels.attention.masks import Tokens
from stretto.kernels.attention.shares import Share, sum_of
from stretto.kernels.fused.attention_config import KERNEL as KERNEL_DERIVES
from stretto.kernels.operation import Axes, Call, Kernel
from stretto.kernels.operations import attention_by_peer as by_peer
from stretto.kernels.operations import attention_fused as fused
from stretto.kernels.operations import attention_heads as heads
from stretto.kernels.operations.attention_methods import HEADS, OP
from stretto.kernels.operations.attention_options import Config, Operands
from stretto.kernels.operations.collectives import all_gather, reduce_scatter
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem.problem import Problem
from stretto.kernels.xla.matmul import accumulator_dtype

TYPES = ("bfloat16", "float16", "float32")


def scaled(q: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """q and the number that its scores are multiplied with; a scale that is an array is in q.

    Raises:
      ValueError: `scale` is neither a number nor an array of one.
    """
    if scale is None:
        return q, 1 / math.sqrt(q.shape[-1])
    if isinstance(scale, int | float):
        return q, float(scale)
    if getattr(scale, "shape", None) != () or not _is_real(scale.dtype):
        raise ValueError(
            f"{OP}: scale={scale!r:.60} must be a real number, or an array of one, of shape ()."
        )
    if isinstance(scale, np.generic):
        return q, float(scale)
    wide = accumulator_dtype(q.dtype)
    return (q.astype(wide) * scale.astype(wide)).astype(q.dtype), 1.0


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


def of_nothing(q: jax.Array, k: jax.Array, v: jax.Array, axes: Axes, logsumexp: bool) -> Any:
    """The results where there are no queries, or no keys for them."""
    out, *_ = typed_alike(axes, [jnp.zeros(q.shape, q.dtype), q, k, v])
    if not logsumexp:
        return out
    lse = jnp.full(q.shape[:3], -jnp.inf, accumulator_dtype(q.dtype))
    return out, typed_alike(axes, [lse, q, k, v])[0]


def apply(operands: Operands, call: Call) -> Any:
    """The results."""
    return forward(operands, call)[0]


def forward(operands: Operands, call: Call) -> tuple[Any, Any]:
    """(results, residuals of the derivative).

    A device's part of the result and of its logsumexp, and the peers' keys if they are kept, are
    named "attention" for `jax.checkpoint`.
    """
    if call.options.method == HEADS:
        local = heads.exchanged(operands, call)
        share = _named(heads.attend(local, call), local.q.dtype)
        return _results(heads.returned(share, call), call), (local, share, None)
    share, kept = _gathering(operands, call)
    share = _named(share, operands.q.dtype)
    kept = jax.tree.map(lambda x: checkpoint_name(x, "attention"), kept)
    return _results(share, call), (operands, share, kept)


def backward(call: Call, residuals: Any, bars: Any) -> Operands:
    """The operands' cotangents, from the logsumexp of all keys."""
    operands, share, kept = residuals
    out_bar, lse_bar = bars if call.options.logsumexp else (bars, None)
    if lse_bar is not None:
        lse_bar = lse_bar.transpose(0, 2, 1)
    if call.options.method == HEADS:
        return Operands(*heads.derived(operands, share, out_bar, lse_bar, call))
    out_bar = out_bar.astype(operands.q.dtype)
    if _is_by_peer(call) or kept is not None:
        found = by_peer.derive(operands, share, out_bar, lse_bar, call, kept)
    else:
        found = _derived_together(operands, share, out_bar, lse_bar, call)
    given = operands.q, operands.k, operands.v
    return Operands(*(bar.astype(x.dtype) for bar, x in zip(found, given, strict=True)))


def tangent(call: Call, residuals: Any, dots: Operands) -> Any:
    """By `jax.lax`, block by block, of arrays that XLA gathers."""
    operands, *_ = residuals
    is_heads = call.options.method == HEADS

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Share:
        local = operands._replace(q=q, k=k, v=v)
        if is_heads:
            return heads.attend_by_lax(local, call)
        k, v = (lax.all_gather(x, call.axes, axis=1, tiled=True) for x in (k, v))
        return _by_lax(local, k, v, call)

    if is_heads:
        dots = heads.exchanged(dots._replace(segments=None, kv_segments=None), call)
    given = operands.q, operands.k, operands.v
    _, dot = jax.jvp(attend, given, (dots.q, dots.k, dots.v))
    return _results(heads.returned(dot, call) if is_heads else dot, call)


def _named(share: Share, dtype: Any) -> Share:
    out, lse = (checkpoint_name(x, "attention") for x in (share.out.astype(dtype), share.lse))
    return Share(out, lse)


def _results(share: Share, call: Call) -> Any:
    return (share.out, share.lse.transpose(0, 2, 1)) if call.options.logsumexp else share.out


# --- Keys and values together ---------------------------------------------------------------------


def _gathering(operands: Operands, call: Call) -> tuple[Share, Any]:
    """(attention to all keys, those of peers if they are kept)."""
    if isinstance(call.config, fused.Config):
        return fused.attend(operands, call)
    attend = by_peer.attend if _is_by_peer(call) else _together
    return attend(operands, call), None


def _together(operands: Operands, call: Call) -> Share:
    options = call.options
    keys = _gathered(operands, call)
    if options.by_cudnn:
        span = options.span(call.axes)
        return cudnn.forward(operands.q, keys, span, options.mask, options.scale)
    return _by_lax(operands, *(keys.before or keys.own), call)


def _is_by_peer(call: Call) -> bool:
    """Whether keys, and their derivatives, are sent peer by peer; after "fused" the derivatives."""
    if isinstance(call.config, fused.Config):
        return axis_size(call.axes) == 2 or call.config.backward == KERNEL_DERIVES
    return call.config is not None and call.config.by_peer


def _by_lax(operands: Operands, k: jax.Array, v: jax.Array, call: Call) -> Share:
    tokens = _tokens(operands, call)
    mask, scale = call.options.mask, call.options.scale
    return Share(*blockwise.forward(operands.q, k, v, *tokens, mask=mask, scale=scale))


def _tokens(operands: Operands, call: Call) -> tuple[Tokens, Tokens]:
    others = operands.kv_segments
    if others is not None:
        others = lax.all_gather(others, call.axes, axis=1, tiled=True)
    span = call.options.span(call.axes)
    queries = Tokens(span.positions(operands.q.shape[1]), operands.segments)
    return queries, Tokens(span.all_positions(operands.k.shape[1]), others)


def _gathered(operands: Operands, call: Call) -> cudnn.Keys:
    own = operands.k, operands.v
    options = call.options
    if axis_size(call.axes) == 1:
        return cudnn.Keys(own=own, before=None)
    gather = functools.partial(all_gather, axis_name=call.axes, axis=1, backend=options.moves)
    every = gather(operands.k), gather(operands.v)
    if options.by_cudnn and options.mask.causal:
        span = options.span(call.axes)
        every = span.in_order(every[0]), span.in_order(every[1])
    return cudnn.Keys(own=own, before=every)


def _derived_together(
    operands: Operands, share: Share, out_bar: jax.Array, lse_bar: jax.Array | None, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array]:
    options, own = call.options, None
    span, mask, scale = options.span(call.axes), options.mask, options.scale
    keys = _gathered(operands, call)
    if options.by_cudnn and lse_bar is None:
        q_bar, own, every = cudnn.backward(
            operands.q, keys, share.out, share.lse, out_bar, span, mask, scale
        )
        if every is not None and mask.causal:
            every = span.by_device(every[0]), span.by_device(every[1])
    else:
        if options.by_cudnn and mask.causal and keys.before is not None:
            keys = dataclasses.replace(
                keys, before=(span.by_device(keys.before[0]), span.by_device(keys.before[1]))
            )
        q_bar, *every = blockwise.backward(
            operands.q,
            *(keys.before or keys.own),
            *(share.out, share.lse, out_bar, lse_bar),
            *_tokens(operands, call),
            mask=mask,
            scale=scale,
        )
    sent = [] if every is None else [_handed_over(x, operands.k.dtype, call) for x in every]
    shares = [found for found in (sent, own) if found]
    k_bar, v_bar = (sum_of(of_one) for of_one in zip(*shares, strict=True))
    return q_bar, k_bar, v_bar


def _handed_over(bar: jax.Array, dtype: Any, call: Call) -> jax.Array:
    """The sum of all devices' shares of the own keys' derivative, float32 or wider."""
    if axis_size(call.axes) == 1:
        return bar
    backend = call.options.moves
    found = reduce_scatter(bar.astype(dtype), call.axes, axis=1, backend=backend)
    return found.astype(accumulator_dtype(dtype))


# --- What serves ----------------------------------------------------------------------------------


def _obstacle(problem: Problem) -> str | None:
    if problem.types.lhs not in TYPES:
        return f"kernels add derivatives of {', '.join(TYPES)}, not {problem.types.lhs}."
    return None


def _candidates(problem: Problem | None) -> Iterator[Config | fused.Config]:
    """Of both kernels: a table has the faster one of a size, told by its configuration."""
    yield from (Config(), Config(by_peer=False))
    if problem is not None:
        yield from fused.candidates(problem)


KERNEL = Kernel(
    Config=Config,
    run=apply,
    obstacle=_obstacle,
    default=lambda problem: Config(by_peer=problem.devices == 2),
    candidates=_candidates,
    untried=True,
)

FUSED = Kernel(
    Config=fused.Config,
    run=apply,
    obstacle=fused.of_machine,
    default=fused.default,
    candidates=fused.Config.candidates,
    untried=True,
)
"""Served where `method="fused"` or its configuration is given: `KERNEL` comes before it."""

XLA = dataclasses.replace(
    KERNEL,
    Config=type(None),
    obstacle=lambda problem: None,
    default=lambda problem: None,
    candidates=lambda problem: iter(()),
)
"""Keys and values gathered together, by the implementation that serves `all_gather`."""
