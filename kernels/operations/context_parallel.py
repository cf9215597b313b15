"""`context_parallel_attention`: attention over a sequence that is split between devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.attention.layouts import CONTIGUOUS, check_layout
from stretto.kernels.attention.masks import Mask
from stretto.kernels.choice import speed
from stretto.kernels.choice.choice import Choice
from stretto.kernels.fused import attention_config
from stretto.kernels.operation import Axes, Call, Examples, Operation
from stretto.kernels.operations import attention_examples as examples
from stretto.kernels.operations import attention_fused as fused
from stretto.kernels.operations import attention_heads, attention_methods
from stretto.kernels.operations import attention_rules as rules
from stretto.kernels.operations.attention_checks import check_operands, check_segments
from stretto.kernels.operations.attention_methods import AUTO, FUSED, GATHER, HEADS, OP
from stretto.kernels.operations.attention_options import Operands, Options
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.problem import checks
from stretto.kernels.problem.fields import check_fields
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.promotion import by_default_rules


@takes_numpy_arrays
@by_default_rules
def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: AxisNames,
    *,
    causal: bool = False,
    scale: float | jax.Array | None = None,
    layout: str = CONTIGUOUS,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    return_logsumexp: bool = False,
    method: str = AUTO,
    config: rules.Config | fused.Config | None = None,
    backend: str = "auto",
) -> Any:
    """`softmax(scale q k^T) v` over the whole sequence, inside `jax.shard_map`; differentiable.

    | operand | shape per device | type |
    |---|---|---|
    | q | `[batch, tokens, heads, dim]` | floating-point |
    | k, v | `[batch, kv_tokens, kv_heads, dim]`, kv_heads a divisor of heads | q's |
    | segment_ids, kv_segment_ids | `[batch, tokens]`, `[batch, kv_tokens]` | integer |
    | out | q's | q's |

    A query whose mask leaves no key has the result 0, and a logsumexp of minus infinity. cuDNN
    serves 16-bit types on GPUs, with head sizes up to 256, without segment ids, and without a
    window if keys are gathered from several devices. `jax.lax` serves the rest but "fused", block
    by block, in memory linear in the tokens.

    Args:
      q, k, v: the device's own tokens.
      axis_name: mesh axis, or tuple of axes, that the tokens are split along.
      causal: a query attends to no later key; k and v must be as long as q.
      scale: of the scores; `dim ** -0.5` by default. An array, which may be differentiated, is
        multiplied into q first.
      layout: of q, k and v: "contiguous", or "zigzag" (`to_zigzag`), which balances the work
        of a causal mask between devices.
      window: the largest number of keys that a query attends to, its own included; with `causal`.
      segment_ids: of documents packed into one sequence; a query attends to its own document only.
      kv_segment_ids: of the keys; those of the queries by default.
      return_logsumexp: also return float32 `[batch, tokens, heads]`. `jax.lax` then computes the
        backward pass, unless the kernel of "fused" does: that of cuDNN does not support the
        cotangent of the logsumexp.
      method: "gather" (each device gathers all keys, for its own queries), "heads" (each device
        computes some heads, for all tokens), "fused" (as "gather", by a kernel that pulls keys
        during attention: 16-bit types, head sizes 64 and 128, whole tiles), or "auto": the faster
        one of the first two by an estimate, or the only one that cuDNN supports; "fused" with
        segment ids, and in place of "gather" where a tuned table has it as the fastest. `explain`
        prints the choice and its reason. Where the kernel of "fused" cannot serve,
        `backend="auto"` falls back on "gather".
      config: for "gather": whether keys are sent peer by peer; for "fused": how the kernel is cut
        up; chosen by default.
      backend: "xla" (XLA gathers all keys together), "pallas" (as `config` selects; Stretto's
        collectives move arrays that are gathered together), "auto" (the fastest by a tuned table;
        without one as "xla"), "simulator" (Stretto's collectives, simulated).

    Raises:
      ValueError: operands that do not match, an unknown layout, method, axis or backend, an odd
        number of tokens in zigzag, heads that `method="heads"` cannot split.

    Memory: "gather" holds k and v of the whole sequence (in zigzag, if gathered together, a
    second time in the order of the sequence), and up to four times the result; in the backward
    pass also float32 sums of derivatives. "fused" keeps the peers' k and v for the backward pass
    unless its configuration has `keep=False`. "heads" holds exchanged copies of the operands and of
    the result.
    Synchronisation: every device of the team must make the call.
    """
    axes = canonical_axes(axis_name)
    window, devices = check_operands(q, k, v, causal, window), axis_size(axes)
    checks.check_flag(OP, "return_logsumexp", return_logsumexp)
    q, scale = rules.scaled(q, scale)
    check_layout(OP, layout, q_tokens=q.shape[1], kv_tokens=k.shape[1])
    if kv_segment_ids is None and q.shape[1] == k.shape[1]:
        kv_segment_ids = segment_ids
    check_segments(q, k, segment_ids, kv_segment_ids)
    ids = tuple(str(x.dtype) for x in (segment_ids, kv_segment_ids) if x is not None)
    method = _method_of(method, config)
    if window is not None and not checks.is_symbolic(q) and window >= devices * q.shape[1]:
        window = None  # Of as many keys as there are.
    mask = Mask(causal=causal, window=window)
    sizes = examples.sizes_of(q, k, devices, causal=causal, layout=layout)
    types = Types(lhs=str(q.dtype), rhs=str(k.dtype), out=str(q.dtype))
    record = CONTEXT_PARALLEL_ATTENTION
    call_of = functools.partial(decide, sizes=sizes, types=types, axes=axes, backend=backend)
    if 0 in (*q.shape, *k.shape):
        call_of(record, options=None, config=config, obstacle="an operand is empty.")
        return rules.of_nothing(q, k, v, axes, return_logsumexp)
    question = attention_methods.Question(
        q=q,
        k=k,
        mask=mask,
        layout=layout,
        segments=ids,
        devices=devices,
    )
    chosen = attention_methods.chosen(method, question)
    if method == AUTO == backend and config is None:
        problem = Problem(
            operation=OP, sizes=sizes, types=types, devices=devices, machine=Machine.of_mesh()
        )
        if ids and _is_served(question, problem, fused.default(problem), scale):
            chosen = chosen.by_kernel(attention_methods.BY_LAX)
            config = fused.default(problem)
        elif chosen.name == GATHER and _is_fastest_fused(question, problem, scale):
            chosen = chosen.by_kernel(attention_methods.FASTEST)
            record = dataclasses.replace(record, kernels=(rules.FUSED,))
    elif method == FUSED and config is None:
        config = attention_config.config_for(q.shape[-1])
    options = Options(
        method=chosen.name,
        layout=layout,
        mask=mask,
        scale=scale,
        by_cudnn=chosen.by_cudnn,
        logsumexp=return_logsumexp,
        moves=backend,
        copies=attention_heads.copies(k.shape[2], devices) if chosen.name == HEADS else 1,
    )
    operands = Operands(q, k, v, segment_ids, kv_segment_ids)
    obstacle = _not_fused(config, question, scale) if chosen.name == FUSED else None

    def remark(choice: Choice) -> str:
        return chosen.remark(choice, _not_derived(choice.config, question))

    call = call_of(record, options=options, config=config, obstacle=obstacle, remark=remark)
    return reference(operands, axes, options) if call is None else perform(operands, call)


def _method_of(method: str, config: Any) -> str:
    """The method, which a configuration decides where the caller does not.

    Raises:
      ValueError: a configuration of another method.
    """
    if config is None:
        return method
    own = FUSED if isinstance(config, fused.Config) else GATHER
    if method not in (own, AUTO):
        raise ValueError(f"{OP}: config={config!r} is for method={own!r}; pass one of the two.")
    return own


def _not_fused(config: Any, question: attention_methods.Question, scale: float) -> str | None:
    """Why the fused kernel of this configuration, if one is given, cannot serve the call.

    Raises:
      ValueError: a configuration that serves no call.
    """
    if not isinstance(config, fused.Config):
        return None
    check_fields(config)
    config.check()
    if checks.is_symbolic(question.q, question.k):
        return attention_methods.UNKNOWN
    return fused.obstacle(
        question.q,
        question.k,
        config,
        mask=question.mask,
        layout=question.layout,
        devices=question.devices,
        segments=question.segments,
        scale=scale,
    )


def _not_derived(config: Any, question: attention_methods.Question) -> str | None:
    """Why the fused kernel of this configuration, if it is one, does not derive as well."""
    if not isinstance(config, fused.Config):
        return "it does not serve."
    sequence = fused.sequence_of(question.mask, question.layout, question.devices)
    return fused.not_derived(question.q, question.k, config, sequence)


def _is_served(
    question: attention_methods.Question, problem: Problem, config: fused.Config, scale: float
) -> bool:
    """Whether the fused kernel of this configuration can serve the call on such devices."""
    if fused.of_machine(problem) is not None:
        return False
    return _not_fused(config, question, scale) is None


def _is_fastest_fused(question: attention_methods.Question, problem: Problem, scale: float) -> bool:
    """Whether the tuned table has the fused kernel as the fastest, and it can serve the call."""
    if checks.is_symbolic(question.q, question.k):
        return False
    found = speed.by_nearest(CONTEXT_PARALLEL_ATTENTION, rules.FUSED, problem)
    if found is None or found.backend != "pallas":
        return False
    return _is_served(question, problem, found.config, scale)


def record_by_sizes(problem: Problem) -> Operation:
    """The record with the kernel that `auto` would take for a problem, by its sizes alone."""
    sizes, how = problem.sizes, examples.keywords_of(problem.sizes)
    q, k, _ = (
        jax.ShapeDtypeStruct(operand.shape, jnp.dtype(problem.types.lhs))
        for operand in examples.operands(sizes, problem.devices)
    )
    question = attention_methods.Question(
        q=q,
        k=k,
        mask=Mask(causal=how["causal"]),
        layout=how["layout"],
        segments=(),
        devices=problem.devices,
    )
    if not _is_fastest_fused(question, problem, sizes["dim"] ** -0.5):
        return CONTEXT_PARALLEL_ATTENTION
    return dataclasses.replace(CONTEXT_PARALLEL_ATTENTION, kernels=(rules.FUSED,))


def reference(operands: Operands, axes: Axes, options: Options) -> Any:
    """Keys gathered together, or heads exchanged; attention as on one device."""
    call = Call(
        operation=CONTEXT_PARALLEL_ATTENTION,
        kernel=rules.XLA,
        config=None,
        axes=axes,
        options=options,
        backend="xla",
    )
    return perform(operands, call)


CONTEXT_PARALLEL_ATTENTION = Operation(
    name=OP,
    public=context_parallel_attention,
    sizes=examples.SIZES,
    reference=reference,
    forward=rules.forward,
    tangent=rules.tangent,
    backward=rules.backward,
    work=examples.work,
    kernels=(rules.KERNEL, rules.FUSED),
    examples=Examples(
        sets=examples.SETS,
        shapes=examples.shapes,
        operands=examples.operands,
        needs=examples.needs,
        keywords_of=examples.keywords_of,
        timed=examples.timed,
    ),
)
