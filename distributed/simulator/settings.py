"""How simulations run."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import Literal

from stretto.distributed.simulator.machine import Limits
from stretto.distributed.simulator.reports.trace import Trace
from stretto.distributed.simulator.scheduler import ORDERS
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.distributed.simulator.state.mail import Mail

ROTATION = ("pct", "random")
"""The schedules that take turns under "rotating": what one rarely finds the other often does."""


def schedule_of(seed: int, schedule: str = "rotating") -> str:
    """The schedule that a run with `seed` has: `schedule`, or the seed's turn of the rotation."""
    return ROTATION[seed % len(ROTATION)] if schedule == "rotating" else schedule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the kernels under one `simulate` run. See `simulate` for what each means."""

    seed: int = 0
    schedule: str = "random"
    detect_races: bool = True
    check_hardware: bool = True
    on_finding: Literal["raise", "record"] = "raise"
    limits: Limits = field(default_factory=Limits)
    cost_model: CostModel | None = None
    trace: Trace | None = None
    rendezvous_timeout: float = 60.0
    order_seed: int = 0
    mail: Mail = field(default_factory=Mail)

    def __post_init__(self) -> None:
        if self.schedule not in ORDERS:
            known = sorted([*ORDERS, "rotating"])
            raise ValueError(f"schedule={self.schedule!r} is not one of {known}.")
        if self.on_finding not in ("raise", "record"):
            raise ValueError(f'on_finding={self.on_finding!r} is neither "raise" nor "record".')
        if self.limits.resident_blocks < 1:
            raise ValueError(f"resident_blocks={self.limits.resident_blocks} must be at least 1.")

    def for_launch(self, kernel: str, number: int) -> Settings:
        """The settings of the `number`-th launch of a kernel: each has an order of its own."""
        mixed = zlib.crc32(f"{self.seed}/{kernel}/{number}".encode())
        return dataclasses.replace(self, order_seed=mixed)
