"""A function with its own rules for `vmap` and for the transpose, inlined where it is lowered.

`jax.custom_batching.custom_vmap` is lowered as a function of its own, whose kernels XLA sees apart
from what makes their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from stretto.distributed.private_jax.inlining import inline

mapped_p = Primitive("stretto_mapped")
mapped_p.multiple_results = True

type Leaves = list[jax.Array]
type Rule = Callable[[int, Any, Any], Any]
type Transpose = Callable[[Any, Any], Any]


def mapped(
    fun: Callable[[Any], Any], rule: Rule, operands: Any, transpose: Transpose | None = None
) -> Any:
    """`fun(operands)`, which `vmap` maps by `rule`.

    Args:
      fun: of a tree of arrays; it may use no traced values from outside.
      rule: (size of the batch, tree of whether each operand has one, operands) -> results, all
        with the batch in front, as the operands have it; or None, for `fun` to be mapped itself.
      operands: a tree of arrays.
      transpose: of a function that is linear in each operand: (operands, cotangents of the results)
        -> cotangents of the operands. Those of which it is transposed are zeros in `operands`.
    """
    leaves, tree = jax.tree.flatten(operands)
    out_trees = []

    def flat(*leaves: jax.Array) -> Leaves:
        out, out_tree = jax.tree.flatten(fun(jax.tree.unflatten(tree, leaves)))
        out_trees.append(out_tree)
        return out

    def flat_rule(size: int, batched: Sequence[bool], leaves: Sequence[jax.Array]) -> Any:
        out = rule(size, jax.tree.unflatten(tree, batched), jax.tree.unflatten(tree, leaves))
        return None if out is None else jax.tree.leaves(out)

    def flat_transpose(leaves: Sequence[jax.Array], bars: Sequence[jax.Array]) -> Leaves:
        if transpose is None:
            raise NotImplementedError("this call is not linear in its operands.")
        bars = jax.tree.unflatten(out_trees[0], bars)
        return tree.flatten_up_to(transpose(jax.tree.unflatten(tree, leaves), bars))

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    outs = mapped_p.bind(*leaves, jaxpr=jaxpr, rule=flat_rule, transpose=flat_transpose)
    return jax.tree.unflatten(out_trees[0], outs)


@mapped_p.def_impl
def _impl(*args, jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*args)


@mapped_p.def_effectful_abstract_eval
def _abstract_eval(*_, jaxpr, **__):
    return jaxpr.out_avals, jaxpr.effects


def _batch(args, dims, *, jaxpr, rule, **_):
    batched = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(x, dim, 0) if dim is not None else x for x, dim in zip(args, dims, strict=True)
    ]
    size = next(x.shape[0] for x, b in zip(moved, batched, strict=True) if b)
    outs = rule(size, batched, moved)
    if outs is None:
        fun = jaxpr_as_fun(jaxpr)
        outs = jax.vmap(fun, in_axes=[0 if b else None for b in batched])(*moved)
    return outs, [0] * len(outs)


batching.primitive_batchers[mapped_p] = _batch


def _jvp(primals, tangents, *, jaxpr, **_):
    """As of the function itself."""
    dots = [ad.instantiate_zeros(dot) for dot in tangents]
    return jax.jvp(jaxpr_as_fun(jaxpr), primals, dots)


ad.primitive_jvps[mapped_p] = _jvp


def _transpose(bars, *args, jaxpr, transpose, **_):
    bars = [
        ad.instantiate_zeros(ad.Zero(aval.to_ct_aval())) if type(bar) is ad.Zero else bar
        for bar, aval in zip(bars, jaxpr.out_avals, strict=True)
    ]
    unknown = [ad.is_undefined_primal(x) for x in args]
    known = [
        ad.instantiate_zeros(ad.Zero(x.aval)) if moved else x
        for x, moved in zip(args, unknown, strict=True)
    ]
    found = transpose(known, bars)
    return [bar if moved else None for bar, moved in zip(found, unknown, strict=True)]


ad.primitive_transposes[mapped_p] = _transpose


def lower_inlined(ctx, *args, jaxpr, **_):
    """Lowers what `jaxpr` holds in the place of the operation."""
    return inline(ctx, jaxpr, args)


mlir.register_lowering(mapped_p, lower_inlined, cacheable=False)
