"""Counts of what a simulation did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """What the launches of one simulation did, summed.

    Attributes:
      link_bytes: bytes sent over the link from one device to another, by (from, to).
      copies: number of bulk copies (TMA) issued.
      copy_bytes: bytes that they moved.
      waits: waits on barriers and semaphores.
      blocked_waits: those that had to wait.
      signals: semaphore signals, each device of a multicast counted.
      flops: floating point operations of the tensor cores.
      steps: steps that the scheduler gave to tasks and copies.
      peak_shared_bytes: the most shared memory that one block held.
      predicted_seconds: time of all launches by the cost model; 0 without one.
      matmul_busy_seconds: time that one device's tensor cores were busy, the mean over devices.
    """

    link_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    copies: int = 0
    copy_bytes: int = 0
    waits: int = 0
    blocked_waits: int = 0
    signals: int = 0
    flops: int = 0
    steps: int = 0
    peak_shared_bytes: int = 0
    predicted_seconds: float = 0.0
    matmul_busy_seconds: float = 0.0

    @property
    def remote_bytes(self) -> int:
        """Bytes sent over all links."""
        return sum(self.link_bytes.values())

    def __str__(self) -> str:
        text = (
            f"{self.steps} steps, {self.waits} waits ({self.blocked_waits} blocked), {self.signals}"
            f" signals, {self.copies} copies, {self.copy_bytes} bytes in all, {self.remote_bytes}"
            f" bytes between devices, at most {self.peak_shared_bytes} bytes of shared memory in a"
            " block"
        )
        if self.predicted_seconds:
            text += (
                f"; predicted {self.predicted_seconds * 1e6:.1f} us, tensor cores busy"
                f" {self.matmul_busy_seconds * 1e6:.1f} us"
            )
        return text
