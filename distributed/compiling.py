"""The GPUs that kernels are compiled for while their script runs on CPU devices (`ahead`)."""

from __future__ import annotations

import contextlib
import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """GPUs that are not there.

    Attributes:
      name: a file of `configs/targets/`, without its ending.
      kind: the devices' name, as JAX has it.
      multiprocessors: of one.
    """

    name: str
    kind: str
    multiprocessors: int


# Part of the key of JAX's caches, so that nothing that is traced or lowered for a target is used
# outside, nor the other way round.
_current = jax.make_user_context(default_value=None)


def current() -> Target | None:
    """The GPUs that what is traced here is for, None if it is for the devices that are there."""
    return _current.value


def compiling_for(target: Target) -> contextlib.AbstractContextManager[None]:
    """Programs traced inside are for `target`, with any devices in their mesh."""
    return _current(target)
