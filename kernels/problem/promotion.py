"""JAX's default rules of promotion for the arithmetic of this package, whatever a program sets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax


def by_default_rules[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, traced as if neither of these options were set.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` ask a program to
    write its own conversions out. What it calls is not its own.
    """

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            # Each context is a part of the keys of JAX's caches, so it is entered where needed.
            if jax.config.jax_numpy_rank_promotion != "allow":
                stack.enter_context(jax.numpy_rank_promotion("allow"))
            if jax.config.jax_numpy_dtype_promotion != "standard":
                stack.enter_context(jax.numpy_dtype_promotion("standard"))
            return fun(*args, **kwargs)

    return call
