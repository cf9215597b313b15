"""The clocks of the cards right after they were timed, and whether the power limit lowered them.

A card at its power limit lowers its clocks: times of one program differ by a sixth with what ran
before it, so a time says little without them. NVML is asked between visits, when nothing is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stretto.launch import environment

pynvml: Any = None
with contextlib.suppress(ImportError):  # `stretto[cuda13]` has it.
    import pynvml


class Clock(NamedTuple):
    """The clock of the slowest card at one moment.

    Attributes:
      mhz: of its multiprocessors.
      most_mhz: the highest they can have.
      at_power_limit: whether the power limit lowers it.
    """

    mhz: int
    most_mhz: int
    at_power_limit: bool


class Clocks:
    """Reads the clocks of the cards that this process may use; of none where there is no NVML."""

    def __init__(self, on_gpu: bool):
        self._cards = _cards() if on_gpu else []

    def read(self) -> Clock | None:
        """The clock of the slowest card, None where it cannot be read."""
        try:
            return min((_clock(card) for card in self._cards), default=None)
        except Exception:  # A driver or a card that does not tell.
            self._cards = []
            return None


def median_mhz(clocks: Sequence[Clock]) -> float | None:
    """In MHz; None of none."""
    return float(np.median([clock.mhz for clock in clocks])) if clocks else None


def share_at_limit(clocks: Sequence[Clock]) -> float | None:
    """How many of them the power limit lowered; None of none."""
    return float(np.mean([clock.at_power_limit for clock in clocks])) if clocks else None


def _cards() -> list[Any]:
    """NVML's handles. CUDA's variable numbers the cards as NVML does, or names them."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
        named = environment.current().get("CUDA_VISIBLE_DEVICES")
        names = range(pynvml.nvmlDeviceGetCount()) if named is None else named.split(",")
        return [_card(str(name).strip()) for name in names]
    except pynvml.NVMLError:
        return []


def _card(name: str) -> Any:
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _clock(card: Any) -> Clock:
    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(card)
    return Clock(
        mhz=pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        most_mhz=pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM),
        at_power_limit=bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap),
    )
