"""Beside what attention over a split sequence is timed: attention alone, and what users write.

On GPUs they attend by cuDNN, elsewhere by `jax.lax`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.attention import cudnn
from stretto.kernels.attention.layouts import CONTIGUOUS, Span
from stretto.kernels.attention.masks import Mask
from stretto.kernels.attention.peers import Keys, Queries
from stretto.kernels.attention.shares import merged, sum_of
from stretto.kernels.fused import attention, attention_config, attention_derivative
from stretto.kernels.operation import Operand, Operation
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.operations.attention_by_peer import shifted
from stretto.kernels.problem.machine import Machine

ATTENTION: Operation = OPERATIONS["context_parallel_attention"]
type Attend = Callable[..., jax.Array]


def alone(case: Case, mesh: Mesh) -> list[Candidate]:
    """Attention over the whole sequence on one device, of as many heads as make its share."""
    del mesh
    sizes, devices = case.sizes, case.devices
    if sizes["kv_heads"] % devices:
        raise UnavailableError(f"{sizes['kv_heads']} heads of keys are not for {devices} devices")
    heads = [sizes[name] // devices for name in ("heads", "kv_heads", "kv_heads")]
    tokens = [sizes[name] for name in ("t", "kv_t", "kv_t")]
    operands = tuple(
        Operand(shape=(sizes["b"], t, h, sizes["dim"])) for t, h in zip(tokens, heads, strict=True)
    )
    attend = _timed(case, functools.partial(_on_one_device, case, Span(CONTIGUOUS, 1, 0)))
    return [Candidate(body=attend, operands=operands)]


def contiguous(case: Case, mesh: Mesh) -> list[Candidate]:
    """XLA's all-gather and cuDNN, on tokens that lie in a row: the last device has most to do."""
    options = {**case.operation.examples.keywords_of(case.sizes), "layout": CONTIGUOUS}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        public: Any = case.operation.public
        axes = mesh.axis_names
        return public(q, k, v, axes, method="gather", backend="xla", **options)

    return [Candidate(body=_timed(case, attend), operands=case.operands)]


def ring(case: Case, mesh: Mesh) -> list[Candidate]:
    """Keys go from neighbour to neighbour, and each step's result is merged: ring attention.

    H. Liu, M. Zaharia and P. Abbeel, arXiv:2310.01889; the layout is the case's.
    """
    if case.devices == 1:
        raise UnavailableError("one device has no neighbours")
    ring = _Ring(case=case, axes=mesh.axis_names)

    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ring.forward(q, k, v).out

    def forward(*operands: jax.Array) -> tuple[jax.Array, Any]:
        share = ring.forward(*operands)
        return share.out, (operands, share)

    def backward(kept: Any, bar: jax.Array) -> Any:
        operands, share = kept
        q, k, v = operands
        return ring.backward(q, k, v, share, bar)

    attend.defvjp(forward, backward)
    return [Candidate(body=_timed(case, attend), operands=case.operands)]


def fused(case: Case, mesh: Mesh) -> list[Candidate]:
    """Stretto's kernel that pulls keys, in each configuration that the tuner would try."""
    found = []
    for config in attention_config.Config.candidates(case.problem(Machine.of_mesh())):
        call = case.call("pallas", config, axes=mesh.axis_names)
        found.append(Candidate(body=call, operands=case.operands, config=str(config)))
    return found


def own(case: Case, mesh: Mesh) -> list[Candidate]:
    """The same kernel on one device, with no peers, and that of its derivative; as `alone`."""
    if Machine.of_mesh().platform != "gpu":
        raise UnavailableError("it runs on GPUs")
    sequence = attention_config.Sequence(causal=_mask(case).causal)
    (whole,) = alone(case, mesh)
    found = []
    for config in attention_config.Config.candidates(case.problem(Machine.of_mesh())):
        body = _timed(case, _by_own_kernels(sequence, config))
        found.append(dataclasses.replace(whole, body=body, config=str(config)))
    return found


def _by_own_kernels(sequence: attention_config.Sequence, config: attention_config.Config) -> Attend:
    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        scale = q.shape[-1] ** -0.5
        out, lse = attention.attend(q, k, v, None, sequence, scale=scale, config=config)
        return out, (q, k, v, out, lse)

    def backward(kept: Any, bar: jax.Array) -> Any:
        q, k, v, out, lse = kept
        delta = jnp.einsum("bthd,bthd->bht", out, bar, preferred_element_type=lse.dtype)
        given = q, k, v, bar, lse, delta, sequence
        q_bar, *others = attention_derivative.derive(*given, scale=q.shape[-1] ** -0.5)
        return q_bar.astype(q.dtype), *others

    attend.defvjp(forward, backward)
    return attend


def _timed(case: Case, attend: Attend) -> Attend:
    return case.operation.examples.timed(case.sizes, attend)


def _mask(case: Case) -> Mask:
    return Mask(causal=case.operation.examples.keywords_of(case.sizes)["causal"])


def _queries(case: Case, q: jax.Array, span: Span) -> Queries:
    mask = _mask(case)
    served = cudnn.obstacle(q, mask, segments=False, devices=span.devices) is None
    return Queries(
        q=q, segments=None, span=span, mask=mask, scale=q.shape[-1] ** -0.5, by_cudnn=served
    )


def _on_one_device(case: Case, span: Span, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if _queries(case, q, span).by_cudnn:
        causal = _mask(case).causal
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
    return jax.nn.dot_product_attention(q, k, v, is_causal=_mask(case).causal)


@dataclasses.dataclass(frozen=True)
class _Ring:
    case: Case
    axes: Any

    def _start(self, q: jax.Array) -> tuple[Queries, int, jax.Array]:
        devices, device = self.case.devices, lax.axis_index(self.axes)
        layout = self.case.operation.examples.keywords_of(self.case.sizes)["layout"]
        return _queries(self.case, q, Span(layout, devices, device)), devices, device

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        queries, devices, device = self._start(q)
        share, keys = queries.attend(Keys(k, v)), Keys(k, v)
        for step in range(1, devices):
            keys = shifted(keys, self.axes, 1)
            found = queries.attend(keys, (device - step) % devices)
            share = merged([share, found], jnp.float32)
        return share._replace(out=share.out.astype(q.dtype))

    def backward(self, q: Any, k: Any, v: Any, share: Any, bar: jax.Array) -> tuple:
        queries, devices, device = self._start(q)
        q_bar, *bars = queries.derive(Keys(k, v), share, bar)
        keys = Keys(k, v)
        for step in range(1, devices):
            keys, bars = shifted((keys, bars), self.axes, 1)
            found = queries.derive(keys, share, bar, None, (device - step) % devices)
            q_bar = sum_of([q_bar, found[0]], jnp.float32)
            bars = [sum_of(pair, jnp.float32) for pair in zip(bars, found[1:], strict=True)]
        bars = shifted(bars, self.axes, 1)
        return q_bar.astype(q.dtype), *(x.astype(k.dtype) for x in bars)
