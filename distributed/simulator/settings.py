"""How simulations run."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from stretto.distributed.simulator.machine import Limits
from stretto.distributed.simulator.reports.trace import Trace
from stretto.distributed.simulator.scheduler import ORDERS
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.distributed.simulator.state.mail import Mail

ROTATION = ("pct", "random")
"""The schedules that take turns under "rotating": what one rarely finds the other often does."""


def check_integers(**named: Any) -> None:
    """Raises ValueError unless all are integers, and all but the seed at least 1; None is none."""
    for name, value in named.items():
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(
                f"{name}={value!r:.60} is of type {type(value).__name__}; it must be an integer."
            )
        if name != "seed" and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


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
        if not self.rendezvous_timeout > 0:
            raise ValueError(
                f"rendezvous_timeout={self.rendezvous_timeout} must be a number of seconds above 0."
            )

    def for_launch(self, kernel: str, number: int) -> Settings:
        """The settings of the `number`-th launch of a kernel: each has an order of its own."""
        mixed = zlib.crc32(f"{self.seed}/{kernel}/{number}".encode())
        return dataclasses.replace(self, order_seed=mixed)
