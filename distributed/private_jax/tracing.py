"""Settings of JAX while it traces. Private JAX, checked on 0.11.2 and 0.12.0.1."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from jax._src import config
from jax._src import core as jax_core


def without_varying_types() -> AbstractContextManager[Any]:
    """Values that are traced inside it are not typed as varying over mesh axes."""
    return config._check_vma(False)


def whole_tracebacks() -> AbstractContextManager[Any]:
    """Errors that JAX raises inside it keep the frames of JAX's own."""
    return config.traceback_filtering("off")


def name_of(axis_data: Any) -> Any:
    """The name of an axis that `vmap` maps, as its rules are told of it; None without one."""
    return None if axis_data.name is jax_core.no_axis_name else axis_data.name
