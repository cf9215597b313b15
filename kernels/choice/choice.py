"""The implementation that a call takes: what `stretto.explain` returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from stretto.distributed.devices.topology import Split
from stretto.kernels.operation import Kernel
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation that a call takes, and why.

    Attributes:
      problem: the call.
      backend: "pallas", "xla" or "simulator".
      reason: why, in words.
      kernel, config: the fused kernel that could serve, if there is one, and its configuration.
      fused_us, xla_us: times in microseconds that the choice rests on; None where not known.
      split: the axes within a node, where the team spans nodes and a kernel serves within
        each.
    """

    problem: Problem
    backend: str
    reason: str
    kernel: Kernel | None = dataclasses.field(default=None, repr=False)
    config: Any = None
    fused_us: float | None = None
    xla_us: float | None = None
    split: Split | None = None

    @property
    def interpret(self) -> Any:
        """What the kernel's launch takes as `interpret`."""
        if self.backend != "simulator":
            return None
        # Only a program that simulates imports the simulator.
        from stretto.distributed.simulator import SimulatorParams

        return SimulatorParams()

    def __str__(self) -> str:
        times = [
            f"{name} {us:.0f} us"
            for name, us in (("fused", self.fused_us), ("XLA", self.xla_us))
            if us is not None
        ]
        return f"{self.problem}: {self.backend}, because {self.reason}" + (
            f" ({', '.join(times)})" if times else ""
        )
