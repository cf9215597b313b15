"""Traces that no other test uses; emptying JAX's caches does it, too, and takes far longer."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax

# Part of the key of JAX's caches, as what `stretto.simulate` sets is.
_group = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def apart() -> Generator[None]:
    """What is traced inside is used nowhere else, nor is anything inside that was traced before.

    For kernels that a test changes, such as by a bug, and for what JAX would not trace again.
    """
    with _group(object()):
        yield
