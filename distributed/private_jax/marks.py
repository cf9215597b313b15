"""Marks in a kernel for those who read its jaxpr. They compute nothing, wherever it runs.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax._src import core as jax_core

from stretto.distributed.private_jax.kernel_rules import EVERYWHERE, SEMAPHORE_EFFECT, lowers

# --- The name of semaphores -----------------------------------------------------------------------

name_p = jax_core.Primitive("stretto_name")
name_p.multiple_results = True


def name_semaphores(ref: Any, name: str) -> None:
    """Gives the semaphores of `ref`, as `pl.get_global` made them, a name for reports."""
    name_p.bind(ref, name=name)


@name_p.def_effectful_abstract_eval
def _name_abstract_eval(_, *, name):
    del name
    return [], {SEMAPHORE_EFFECT}


# --- A place along a mesh axis --------------------------------------------------------------------

place_p = jax_core.Primitive("stretto_place")


def place(index: jax.Array) -> jax.Array:
    """`index`, from `lax.axis_index`, of which the caller knows from which end it counts."""
    return place_p.bind(index)


@place_p.def_abstract_eval
def _place_abstract_eval(index):
    return index


def unmarked_places(jaxpr: Any, axes: frozenset[Hashable]) -> Iterator[Any]:
    """The equations of `jaxpr`, and of those in it, that take an unmarked index along `axes`."""
    marked = {eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive is place_p}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "axis_index" and eqn.outvars[0] not in marked:
            names = eqn.params["axis_name"]
            if axes.intersection(names if isinstance(names, tuple) else (names,)):
                yield eqn
        for inner in jax_core.jaxprs_in_params(eqn.params):
            yield from unmarked_places(inner, axes)


lowers(name_p, EVERYWHERE)(lambda *_, **__: ())
lowers(place_p, EVERYWHERE)(lambda _, index: index)
