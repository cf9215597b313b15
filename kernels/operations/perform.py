"""From a checked call to what serves it: the choice, and the kernel with its derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stretto.distributed.devices.axes import axis_size, make_varying, varying_axes
from stretto.distributed.primitives.batching import mapped
from stretto.distributed.primitives.linear import linear
from stretto.kernels.choice import choose
from stretto.kernels.operation import Arrays, Axes, Call, Operation, Sizes
from stretto.kernels.problem import node_config
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla import collectives


def decide(
    operation: Operation,
    sizes: Sizes,
    types: Types,
    axes: Axes,
    options: Any,
    *,
    backend: str,
    config: Any,
    obstacle: str | None = None,
    copied: int = 0,
    applied: int = 0,
    remark: choose.Remark = choose.nothing_to_say,
) -> Call | None:
    """The call of the kernel that serves, None where XLA does.

    Args:
      operation: what is called.
      sizes: of the whole problem, over all devices.
      types: of the elements.
      axes: the mesh axes of the team.
      options: the operation's own.
      backend, config: the caller's arguments.
      obstacle: why no kernel can serve the call, where the operation found a reason.
      copied: bytes that a kernel's call copies in addition.
      applied: bytes of results that an epilogue is applied to after the kernel.
      remark: a further sentence on the choice, for `explain`.

    Raises:
      ValueError: `backend` is unknown or cannot serve, or `config` does not fit.
    """
    problem = Problem(
        operation=operation.name,
        sizes=sizes,
        types=types,
        devices=axis_size(axes) if axes else 1,
        machine=Machine.of_mesh(),
        copied=copied,
        applied=applied,
    )
    choice = choose.choose(
        operation, problem, backend, config, axes=axes, obstacle=obstacle, remark=remark
    )
    if choice.backend == "xla" or choice.kernel is None:
        return None
    return Call(
        operation=operation,
        kernel=choice.kernel,
        config=choice.config,
        axes=axes,
        options=options,
        backend=backend,
        interpret=choice.interpret,
        split=choice.split,
        pieces=config.pieces if isinstance(config, node_config.Config) else None,
    )


def perform(operands: Arrays, call: Call, by: Callable[..., Arrays] | None = None) -> Arrays:
    """The results of a call that a kernel serves; differentiable in every direction.

    `by`, (operands, call) -> results, replaces the launch of the kernel if it is given.

    Operands are typed as varying over the team's axes, and over what any of them varies over: the
    transpose of this cast is the sum that a replicated operand's gradient needs.
    """
    leaves, tree = jax.tree.flatten(operands)
    alike = typed_alike(call.axes, leaves)
    typed = any(varying_axes(x) for x in alike)
    typed_call = dataclasses.replace(call, typed=typed)
    return (by or run)(jax.tree.unflatten(tree, alike), typed_call)


def typed_alike(axes: Axes, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, each typed as varying over `axes` and over what any of them varies over."""
    varying = frozenset(axes).union(*map(varying_axes, operands))
    return [make_varying(x, varying) for x in operands]


def run(operands: Arrays, call: Call) -> Arrays:
    """The kernel's results or, over several nodes, those of its hierarchical version.

    The rules of derivatives call it, too, so that these can be differentiated again. Of a linear
    operation the tangent is the operation itself. That of another one is computed by XLA, and its
    transpose is fused: reverse mode evaluates the transpose alone.
    """
    if call.operation.forward is None:
        return linear(
            lambda _, xs: launch(xs, call),
            by_default_rules(lambda _, bars: call.operation.backward(call, None, bars)),
            (),
            operands,
        )
    return _run(operands, call)


@by_default_rules
def launch(operands: Arrays, call: Call) -> Arrays:
    """The kernel's results, without any rule for derivatives."""
    if call.split is not None and call.operation.between_nodes is not None:
        return call.operation.between_nodes.run(operands, call)
    rule = call.operation.batched
    if rule is None:
        return call.kernel.run(operands, call)
    return mapped(
        lambda operands: call.kernel.run(operands, call),
        lambda size, batched, operands: rule(launch, size, batched, operands, call),
        operands,
        _transpose_of(call),
    )


def _transpose_of(call: Call) -> Callable[[Arrays, Arrays], Arrays] | None:
    """The transpose by either operand, for `jax.linear_transpose`; None of what is not linear.

    Derivatives have no need of it: they transpose the tangent (`_run_jvp`).
    """
    residuals = call.operation.residuals_of
    if residuals is None or getattr(call.options, "epilogue", None) is not None:
        return None
    return by_default_rules(
        lambda operands, bars: call.operation.backward(call, residuals(operands), bars)
    )


_run = jax.custom_jvp(launch, nondiff_argnums=(1,))


@_run.defjvp
@by_default_rules
def _run_jvp(call: Call, primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
    """Results as for a backward pass, which keeps residuals; and the tangent.

    Operands of integers have tangents without a type, which are left out of what is transposed.
    """
    results, residuals = _forward(primals[0], call)
    dots, tree = jax.tree.flatten(tangents[0])
    moving = [i for i, dot in enumerate(dots) if dot.dtype != jax.dtypes.float0]
    shapes = [dot.shape for dot in dots]  # All that `tangent` may keep: it outlives this trace.

    @by_default_rules
    def tangent(residuals: Any, moved: Sequence[jax.Array]) -> Arrays:
        filled = dict(zip(moving, moved, strict=True))
        whole = [filled[i] if i in filled else _without_type(x) for i, x in enumerate(shapes)]
        return _tangent(call, residuals, jax.tree.unflatten(tree, whole))

    @by_default_rules
    def transpose(residuals: Any, bars: Arrays) -> list[jax.Array]:
        found = tree.flatten_up_to(call.operation.backward(call, residuals, bars))
        return [found[i] for i in moving]

    return results, linear(tangent, transpose, residuals, [dots[i] for i in moving])


def _without_type(shape: tuple[int, ...]) -> Any:
    """The tangent of integers."""
    make = np.zeros if all(isinstance(size, int) for size in shape) else jnp.zeros
    return make(shape, jax.dtypes.float0)


def _forward(operands: Arrays, call: Call) -> tuple[Arrays, Any]:
    if call.operation.forward is None:
        raise ValueError(f"{call.operation.name} is linear and keeps nothing.")
    return call.operation.forward(operands, call)


def _tangent(call: Call, residuals: Any, dots: Arrays) -> Arrays:
    if call.operation.tangent is not None:
        return call.operation.tangent(call, residuals, dots)

    def reference(operands: Arrays) -> Arrays:
        return call.operation.reference(operands, call.axes, call.options)

    return jax.jvp(reference, (residuals,), (dots,))[1]


def cotangent_of_replicated(call: Call, bar: jax.Array) -> jax.Array:
    """The cotangent of a replicated result, as each device should use it.

    Where `shard_map` types its values (`check_vma=True`) it is replicated too, and counts once, as
    it is. Where it does not, each device holds a share of it, and they have to be added up.
    """
    if call.typed:
        return make_varying(bar, call.axes)
    return collectives.all_reduce(bar, call.axes)
