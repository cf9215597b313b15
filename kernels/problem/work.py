"""A problem's work on one device: arithmetic, bytes sent, bytes held."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collective inside a problem, in the terms of nccl-tests.

    Attributes:
      collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
      shape: (rows, columns) of one device's operand of it.
      itemsize: bytes of an element.
      devices: the team's size.
    """

    collective: str
    shape: tuple[int, int]
    itemsize: int
    devices: int

    @property
    def gathers(self) -> bool:
        """Whether every device ends with all devices' operands."""
        return self.collective == "all_gather"

    @property
    def size(self) -> int:
        """Bytes that nccl-tests calls the size of the collective.

        The gathered array of an all-gather; one device's operand of the others.
        """
        rows, columns = self.shape
        whole = self.devices if self.gathers else 1
        return rows * columns * self.itemsize * whole

    @property
    def bus_factor(self) -> float:
        """Bytes that one device must send, as a share of `size`."""
        share = (self.devices - 1) / self.devices
        return 2 * share if self.collective == "all_reduce" else share

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device must send, without reduction in the switch."""
        return self.size * self.bus_factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A problem's work on one device.

    Attributes:
      product: (m, k, n) of the matmul on one device; None for a plain collective.
      matrices: right-hand sides among which the rows of the product are divided.
      traffic: the collective inside; None for an operation on one device.
      memory_bytes: read and written in memory at least, of one that only moves; 0 where nobody
        counted them.
      attention: floating-point operations of attention on one device, of what the mask leaves.
    """

    product: tuple[int, int, int] | None = None
    matrices: int = 1
    traffic: Traffic | None = None
    memory_bytes: float = 0.0
    attention: int = 0

    @property
    def transposed(self) -> Work:
        """The same with the product transposed: columns of the result are its rows."""
        if self.product is None:
            return self
        m, k, n = self.product
        return dataclasses.replace(self, product=(n, k, m))

    @property
    def flops(self) -> int:
        """Floating-point operations, two for each multiply-add."""
        if self.product is None:
            return self.attention
        m, k, n = self.product
        return 2 * m * k * n

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device must send."""
        return self.traffic.sent_bytes if self.traffic is not None else 0.0
