"""Runs multi-GPU kernels on a CPU, and finds their deadlocks and races. See docs/simulator.md."""

from stretto.distributed.simulator.context import (
    SimulatorParams,
    counts_from_the_end,
    is_simulating,
    simulate,
)
from stretto.distributed.simulator.cost_model import CostModel
from stretto.distributed.simulator.errors import (
    DeadlockError,
    FindingError,
    KernelFaultError,
    RendezvousError,
    SimulationError,
    StepLimitError,
    UnsupportedKernelError,
)
from stretto.distributed.simulator.report import Finding, Report

__all__ = [
    "CostModel",
    "DeadlockError",
    "Finding",
    "FindingError",
    "KernelFaultError",
    "RendezvousError",
    "Report",
    "SimulationError",
    "SimulatorParams",
    "StepLimitError",
    "UnsupportedKernelError",
    "counts_from_the_end",
    "is_simulating",
    "simulate",
]
