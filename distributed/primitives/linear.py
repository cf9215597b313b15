"""A linear function with a transpose of its own, differentiable in every direction.

`jax.custom_vjp` allows a fused derivative and forbids forward mode. `jax.custom_jvp` allows both,
and takes the transpose from JAX, which has none for a kernel. Here a tangent is one operation with
a transpose: forward mode evaluates it, reverse mode transposes it, and both can be differentiated
again. `jax.custom_derivatives.linear_call` is similar, but does not support `vmap`, and JAX cannot
differentiate the values on which its residuals depend (JAX 0.11.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from stretto.distributed.primitives.batching import lower_inlined
from stretto.distributed.private_jax import tracing

linear_p = Primitive("stretto_linear")
linear_p.multiple_results = True

type Leaves = Sequence[jax.Array]
type Flat = Callable[[Leaves, Leaves], Leaves]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
    """A linear function and its transpose, of flat (residuals, operands)."""

    apply: Flat
    transpose: Flat


def linear(
    apply: Callable[[Any, Any], Any],
    transpose: Callable[[Any, Any], Any],
    residuals: Any,
    operands: Any,
) -> Any:
    """`apply(residuals, operands)`, which is linear in the operands.

    Args:
      apply: neither it nor `transpose` may use traced values from outside. It has to be
        differentiable in the residuals where these depend on what is differentiated.
      transpose: (residuals, cotangents of the results) -> cotangents of the operands, in their
        tree. It may use operations that `apply` does not, for example fused ones.
      residuals, operands: trees of arrays.
    """
    kept, kept_tree = jax.tree.flatten(residuals)
    moved, moved_tree = jax.tree.flatten(operands)
    out_trees = []

    def flat_apply(kept: Leaves, moved: Leaves) -> Leaves:
        out = apply(jax.tree.unflatten(kept_tree, kept), jax.tree.unflatten(moved_tree, moved))
        leaves, tree = jax.tree.flatten(out)
        out_trees.append(tree)
        return leaves

    def flat_transpose(kept: Leaves, bars: Leaves) -> Leaves:
        bars = jax.tree.unflatten(out_trees[0], bars)
        out = transpose(jax.tree.unflatten(kept_tree, kept), bars)
        return moved_tree.flatten_up_to(out)

    outs = _bind(_Pair(apply=flat_apply, transpose=flat_transpose), kept, moved)
    return jax.tree.unflatten(out_trees[0], outs)


def _bind(pair: _Pair, kept: Leaves, moved: Leaves) -> list[jax.Array]:
    jaxpr = jax.make_jaxpr(lambda *xs: pair.apply(xs[: len(kept)], xs[len(kept) :]))(*kept, *moved)
    return linear_p.bind(*kept, *moved, jaxpr=jaxpr, pair=pair, num_kept=len(kept))


@linear_p.def_impl
def _impl(*args, jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*args)


@linear_p.def_effectful_abstract_eval
def _abstract_eval(*_, jaxpr, **__):
    return jaxpr.out_avals, jaxpr.effects


def _jvp(primals, tangents, *, jaxpr, pair, num_kept):
    outs = linear_p.bind(*primals, jaxpr=jaxpr, pair=pair, num_kept=num_kept)
    kept, moved = primals[:num_kept], primals[num_kept:]
    kept_dots, moved_dots = tangents[:num_kept], tangents[num_kept:]
    dots = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if not _all_zero(moved_dots):
        terms = _bind(pair, kept, [ad.instantiate_zeros(dot) for dot in moved_dots])
        dots = list(map(ad.add_tangents, dots, terms))
    if not _all_zero(kept_dots):
        places = [i for i, dot in enumerate(kept_dots) if type(dot) is not ad.Zero]

        def of_kept(*some):
            xs = list(kept)
            for place, x in zip(places, some, strict=True):
                xs[place] = x
            return jaxpr_as_fun(jaxpr)(*xs, *moved)

        _, terms = jax.jvp(of_kept, [kept[i] for i in places], [kept_dots[i] for i in places])
        dots = list(map(ad.add_tangents, dots, terms))
    return outs, dots


def _all_zero(tangents: Sequence[Any]) -> bool:
    return all(type(dot) is ad.Zero for dot in tangents)


ad.primitive_jvps[linear_p] = _jvp


def _transpose(bars, *args, jaxpr, pair, num_kept):
    kept, moved = args[:num_kept], args[num_kept:]
    avals = [aval.to_ct_aval() for aval in jaxpr.out_avals]
    bars = [
        ad.instantiate_zeros(ad.Zero(aval)) if type(bar) is ad.Zero else bar
        for bar, aval in zip(bars, avals, strict=True)
    ]
    outs = pair.transpose(kept, bars)
    wanted = [
        out if ad.is_undefined_primal(x) else None for x, out in zip(moved, outs, strict=True)
    ]
    return [None] * num_kept + wanted


ad.primitive_transposes[linear_p] = _transpose


def _batch(axis_data, args, dims, *, jaxpr, pair, num_kept):
    """Maps both functions; what is moved is batched throughout, and so is its cotangent."""
    if all(dim is None for dim in dims):  # JAX asks all the same.
        outs = linear_p.bind(*args, jaxpr=jaxpr, pair=pair, num_kept=num_kept)
        return outs, [None] * len(outs)
    size = axis_data.size
    kept, kept_dims = args[:num_kept], tuple(dims[:num_kept])
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args[num_kept:], dims[num_kept:], strict=True)
    ]

    def mapped(fun: Flat) -> Flat:
        def call(kept: Leaves, moved: Leaves) -> Leaves:
            return jax.vmap(
                lambda kept, moved: list(fun(kept, moved)),
                in_axes=(kept_dims, 0),
                axis_size=size,
                axis_name=tracing.name_of(axis_data),
                spmd_axis_name=axis_data.spmd_name,
            )(tuple(kept), list(moved))

        return call

    batched = _Pair(apply=mapped(pair.apply), transpose=mapped(pair.transpose))
    outs = _bind(batched, kept, moved)
    return outs, [0] * len(outs)


batching.fancy_primitive_batchers[linear_p] = _batch


mlir.register_lowering(linear_p, lower_inlined, cacheable=False)
