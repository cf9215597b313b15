"""Runs multi-GPU kernels on a CPU; finds deadlocks and races. See docs/how/simulator.md."""

from stretto.distributed.simulating import counts_from_the_end, is_simulating
from stretto.distributed.simulating import target as simulated_target
from stretto.distributed.simulator.context import (
    SimulatorParams,
    simulate,
)
from stretto.distributed.simulator.reports.errors import (
    DeadlockError,
    FindingError,
    KernelFaultError,
    RendezvousError,
    SimulationError,
    StepLimitError,
    UnsupportedKernelError,
)
from stretto.distributed.simulator.reports.report import Finding, Report
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.distributed.targets import TARGETS, Target

__all__ = [
    "TARGETS",
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
    "Target",
    "UnsupportedKernelError",
    "counts_from_the_end",
    "is_simulating",
    "simulate",
    "simulated_target",
]
