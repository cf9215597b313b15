"""Lowering what an operation holds in the place of the operation.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import core as jax_core
from jax._src.interpreters import mlir


def inline(
    ctx: mlir.LoweringRuleContext,
    jaxpr: jax_core.ClosedJaxpr,
    args: Sequence[Any],
    *,
    context: mlir.ModuleContext | None = None,
    name: str | None = None,
) -> Sequence[Any]:
    """Lowers `jaxpr` on `args`, under `name` if one is given, in `context` or the program's own."""
    outs, tokens = mlir.jaxpr_subcomp(
        ctx.module_context if context is None else context,
        jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr,
        ctx.name_stack if name is None else ctx.name_stack.extend(name),
        ctx.tokens_in,
        mlir.ir_consts(jaxpr.consts, [v.aval for v in jaxpr.jaxpr.constvars]),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    ctx.set_tokens_out(tokens)
    return outs


def zeros_of(ctx: mlir.LoweringRuleContext, aval: Any) -> Any:
    """Zeros in the place of a result of the operation."""
    return mlir.full_like_aval(ctx, 0, aval)
