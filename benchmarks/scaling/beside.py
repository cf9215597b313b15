"""What a step does beside matmuls and memory's work, by times that were noted of each alone."""

from __future__ import annotations

import functools
import math

import numpy as np

from stretto.benchmarks.predict import noted
from stretto.benchmarks.predict.model import Predicted
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target

SORTING = 1.5
"""How far putting rows in order may be off, as a factor on either side; one size was timed."""


@functools.cache
def attention_shares() -> tuple[float, float]:
    """Shares of the card's peak that cuDNN's attention reaches: forward, and with its gradients."""
    shares: dict[str, list[float]] = {"forward": [], "both": []}
    times = noted.times()
    for one in times.attention:
        flops = 2.0 * one.sequence**2 * one.heads * one.head_dim * _passes(one.part)
        target = noted.target_of(one.source)
        peak = machine_file.card_of(target, target.name).bf16_tflops * 1e6
        shares[one.part].append(math.log(flops / one.us / peak))
    forward, both = (math.exp(np.mean(shares[part])) for part in ("forward", "both"))
    return forward, both


def _passes(part: str) -> float:
    """Of a forward pass; backward it is two and a half of them, for scores are made again."""
    return 1.0 if part == "forward" else 3.5


def attention_us(flops: float, direction: str, target: Target) -> Predicted:
    """Causal attention of so many operations forward; of a backward pass what that adds.

    In an interval of a fifth on either side, as far as its measured times lie apart.
    """
    forward, both = attention_shares()
    peak = machine_file.card_of(target, target.name).bf16_tflops * 1e6
    us = flops / (forward * peak)
    if direction == "backward":
        us = _passes("both") * flops / (both * peak) - us
    return Predicted(us=us, low=us / 1.2, high=us * 1.2)


def sorting_us(size: float, target: Target) -> Predicted:
    """Rows in another order, at the share of the memory's rate that was noted."""
    times = noted.times()
    shares = []
    for one in times.rows:
        card = machine_file.card_of(noted.target_of(one.source), one.source)
        shares.append(one.bytes / one.us / card.memory_gb_per_s / 1e3)
    rate = np.mean(shares) * machine_file.card_of(target, target.name).memory_gb_per_s * 1e3
    us = float(size / rate)
    return Predicted(us=us, low=us / SORTING, high=us * SORTING)
