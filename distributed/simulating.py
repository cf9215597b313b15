"""Whether kernels are traced for the simulator; kernels read it without importing the simulator."""

from __future__ import annotations

from typing import NamedTuple

import jax

from stretto.distributed.targets import H100, Target, target_of


class Setting(NamedTuple):
    """What a kernel that is traced for the simulator depends on.

    Attributes:
      core_count: multiprocessors that each device has.
      check_hardware: whether the kernel is lowered for GPUs as well.
      from_the_end: whether it counts its devices from the end (`team.places_reversed`).
      target: the name of the GPU that is simulated (`targets`).
    """

    core_count: int
    check_hardware: bool
    from_the_end: bool
    target: str


# Part of the key of JAX's caches, so that nothing that is traced or lowered for the simulator is
# used outside, nor the other way round. It does not hold the seed: a new seed compiles nothing.
setting = jax.make_user_context(default_value=None)


def is_simulating() -> bool:
    """Whether kernels called here run in the simulator."""
    return setting.value is not None


def counts_from_the_end() -> bool:
    """Whether kernels that are traced here are to count their devices from the end."""
    return is_simulating() and setting.value.from_the_end


def target() -> Target:
    """The GPU that kernels called here are simulated on; an H100 outside of `simulate`."""
    return target_of(setting.value.target) if is_simulating() else H100
