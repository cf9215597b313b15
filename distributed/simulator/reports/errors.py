"""What a simulation raises. Each error carries the report of the run that it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.distributed.errors import StrettoError

if TYPE_CHECKING:
    from stretto.distributed.simulator.reports.report import Report
    from stretto.distributed.sites import Site


class SimulationError(StrettoError, RuntimeError):
    """Base of everything that a simulated kernel can be guilty of.

    Attributes:
      report: the report of the simulation, as far as it got; None before it is attached.
    """

    report: Report | None = None


class DeadlockError(SimulationError):
    """No task can run: each waits for an event that no other task will cause."""


class FindingError(SimulationError):
    """The kernel ran to its end, and did something that it may not do: a race, a dropped copy."""


class KernelFaultError(SimulationError):
    """The kernel did what no device would survive, such as an access out of bounds."""


class UnsupportedKernelError(StrettoError, NotImplementedError):
    """The kernel uses an operation that the simulator does not know. The message has its line.

    Attributes:
      site: the line that the message names; None as long as it names none.
    """

    site: Site | None = None


class RendezvousError(SimulationError):
    """Some devices of the mesh did not reach the kernel in which the others wait."""


class StepLimitError(SimulationError):
    """The simulation passed its step limit: the kernel is larger than thought, or it spins."""
