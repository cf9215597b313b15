"""Accesses to tensor memory: races, and orders that tensor cores do not keep.

Tensor cores, and loads from and stores to tensor memory, run beside the thread that issues them. A
barrier puts them in an order if it was made with `orders_tensor_core=True`; any other, or a
semaphore, puts only the threads in one (PTX's `tcgen05.fence`).
"""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.reports.report import Finding
from stretto.distributed.simulator.state.clocks import Clock, knows
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.races import Access


def read(machine: Any, region: Region, access: Access, tensor: Clock) -> None:
    """Checks and records a read.

    Args:
      machine: the launch.
      region: of tensor memory.
      access: the read.
      tensor: what is in order for readers (`Task.tensor`).
    """
    _check_order(machine, region, access, tensor, machine.detector.last_writes(region))
    machine.detector.read(region, access)


def write(machine: Any, region: Region, access: Access, tensor: Clock) -> None:
    """Checks and records a write; arguments as of `read`."""
    detector = machine.detector
    earlier = [*detector.last_writes(region), *detector.reads_since(region)]
    _check_order(machine, region, access, tensor, earlier)
    detector.write(region, access)


def _check_order(
    machine: Any, region: Region, access: Access, tensor: Clock, earlier: list[Access]
) -> None:
    if not machine.detector.detect_races:
        return
    for one in earlier:
        # What nothing orders is a race, and found by the access itself.
        if one.before(access) and not knows(tensor, one.timeline, one.value):
            machine.report.add(_unordered(region, one, access))


def _unordered(region: Region, first: Access, second: Access) -> Finding:
    kind = "unordered tensor cores"
    return Finding(
        kind=kind,
        key=(kind, first.site, second.site, first.what, second.what, region.buffer.name),
        message=(
            f"race on {region.describe()}:\n"
            f"  {first.describe()}\n"
            f"  {second.describe()}\n"
            "  What is between them orders the threads, and not what tensor cores and tensor"
            " memory do for them. Give the barrier orders_tensor_core=True."
        ),
        sites=(first.site, second.site),
    )
