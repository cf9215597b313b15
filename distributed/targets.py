"""The GPUs that can be simulated, and the limits that kernels depend on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of GPU.

    The name is that of a file in `configs/targets/`, by which kernels are compiled for it.

    Attributes:
      name: what `simulate` calls it.
      title: with its article, for reports.
      capability: (major, minor), its compute capability.
      multiprocessors: of the device.
      tensor_columns: of 128 x 32 bits each, that a block's tensor memory has; 0 without any.
    """

    name: str
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    tensor_columns: int = 0

    @property
    def architecture(self) -> str:
        """ "sm_90" or the like."""
        major, minor = self.capability
        return f"sm_{major}{minor}"

    @property
    def is_blackwell(self) -> bool:
        """Whether its tensor cores are those of `tcgen05`, with a memory of their own."""
        return self.tensor_columns > 0


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name="h100", title="an H100", capability=(9, 0), multiprocessors=132),
        Target(
            name="b200",
            title="a B200",
            capability=(10, 0),
            multiprocessors=148,
            tensor_columns=512,
        ),
    )
}

H100 = TARGETS["h100"]


def target_of(name: str) -> Target:
    """The target called `name`.

    Raises:
      ValueError: no target has that name.
    """
    if name not in TARGETS:
        raise ValueError(f"target={name!r} must be one of {', '.join(TARGETS)}.")
    return TARGETS[name]
