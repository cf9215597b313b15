"""A plan as it is printed, drawn and written: every time in seconds, every size in GB."""

from __future__ import annotations

import msgspec

SCHEMA = "stretto-plan/1"


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One split of a step.

    Attributes:
      split, how: in words, such as "tp=2 dp=4" and "1 at once".
      tp, cp, ep, dp: the axes.
      step_s, low_s, high_s: the step, and its interval.
      exposed_s: of which nothing but communication is done.
      memory_gb: on a device.
      tokens_per_s: of all GPUs.
      tflops_per_gpu: of what the model asks for; what is computed twice counts once.
      parts_s: the parts of the time.
      beyond: how it goes beyond the measurements.
    """

    split: str
    how: str
    tp: int
    cp: int
    ep: int
    dp: int
    step_s: float
    low_s: float
    high_s: float
    exposed_s: float
    memory_gb: float
    tokens_per_s: float
    tflops_per_gpu: float
    parts_s: dict[str, float]
    beyond: list[str]


class Loser(msgspec.Struct, kw_only=True):
    """A split that is not among the best, and why."""

    split: str
    why: str


class ForGpus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All splits over one number of GPUs.

    Attributes:
      gpus, batch: GPUs, and sequences of a step over all of them.
      best: the fastest that fit, fastest first.
      losers: all others.
      fitting, too_large, impossible: how many splits fit, need more memory than there is, or
        cannot be.
      least_gb: the least memory that any split needs; infinite where none can be.
    """

    gpus: int
    batch: int
    best: list[Entry]
    losers: list[Loser]
    fitting: int
    too_large: int
    impossible: int
    least_gb: float


class ScalingRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The best split over a number of GPUs, of the same batch (strong) or a grown one (weak).

    Attributes:
      gpus, batch: as in `ForGpus`.
      best: None where no split fits.
      efficiency: tokens a second and GPU, over those of the first row that fits.
    """

    gpus: int
    batch: int
    best: Entry | None = None
    efficiency: float | None = None


class Plan(msgspec.Struct, kw_only=True):
    """A whole plan; `card_gb` is the memory of a card, `free_gb` the part that a step may use."""

    schema: str
    model: str
    weights: int
    sequence: int
    machine: str
    origin: str
    card: str
    card_gb: float
    free_gb: float
    splits: list[ForGpus]
    strong: list[ScalingRow]
    weak: list[ScalingRow]


class PlannedCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call of an operation, on a number of GPUs; times in microseconds.

    `skipped` says why it has no time, if it has none.
    """

    operation: str
    shape: str
    type: str
    gpus: int
    times: int
    us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    exposed_us: float = 0.0
    way: str = ""
    beyond: list[str] = []
    skipped: str = ""


class CallsPlan(msgspec.Struct, kw_only=True):
    """The calls of a file, on every number of GPUs."""

    schema: str
    machine: str
    origin: str
    calls: list[PlannedCall]
