"""When a pipeline over nodes ends, as `kernels/nodes/pipelines.py` orders its pieces.

Times are in any one unit. A kernel works on one piece at a time, and one piece crosses at a time.
"""

from __future__ import annotations

from collections.abc import Sequence


def gathers(own: float, works: Sequence[float], crossings: Sequence[float]) -> float:
    """A kernel on the own rows, then on every piece; the next piece crosses beside each kernel."""
    end, kernel = 0.0, own
    for work, crossing in zip(works, crossings, strict=True):
        end += max(kernel, crossing)
        kernel = work
    return end + kernel


def scatters(own: float, works: Sequence[float], crossings: Sequence[float]) -> float:
    """A kernel on every piece, each of which then crosses, and on the own rows at last."""
    made = moved = 0.0
    for work, crossing in zip(works, crossings, strict=True):
        made += work
        moved = max(moved, made) + crossing
    return max(made + own, moved)


def reduces(scatter: Sequence[float], crossings: Sequence[float], gather: Sequence[float]) -> float:
    """Every piece is added up within its node, crosses, and is handed out within its node."""
    made = moved = 0.0
    arrivals = []
    for work, crossing in zip(scatter, crossings, strict=True):
        made += work
        moved = max(moved, made) + crossing
        arrivals.append(moved)
    end = made
    for arrival, work in zip(arrivals, gather, strict=True):
        end = max(end, arrival) + work
    return end
