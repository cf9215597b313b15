"""One launch of a kernel on all devices of a mesh: from operands to results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stretto.distributed.simulator import rules  # noqa: F401  (they register themselves)
from stretto.distributed.simulator.machine import Machine
from stretto.distributed.simulator.program import Compiler, KernelInfo, Program
from stretto.distributed.simulator.refusals.limits import over_limits
from stretto.distributed.simulator.refusals.unsupported import check_primitives
from stretto.distributed.simulator.reports.deadlock import describe_deadlock
from stretto.distributed.simulator.reports.errors import (
    DeadlockError,
    FindingError,
    SimulationError,
    UnsupportedKernelError,
)
from stretto.distributed.simulator.reports.flaws import Flaw
from stretto.distributed.simulator.reports.report import Report
from stretto.distributed.simulator.scheduler import Scheduler
from stretto.distributed.simulator.settings import Settings
from stretto.distributed.simulator.state import peers
from stretto.distributed.simulator.state.allocations import is_semaphore
from stretto.distributed.simulator.state.device import Device
from stretto.distributed.simulator.state.memory import Buffer, poison
from stretto.distributed.simulator.state.mesh import DeviceMesh
from stretto.distributed.sites import parameter_names
from stretto.distributed.targets import H100, Target


@dataclass(eq=False)
class KernelCall:
    """A kernel as JAX lowers it, one for each place in a program that calls it.

    Attributes:
      name: the kernel's name.
      jaxpr: of its body; arguments are refs of operands, then of results.
      pallas_mesh: grid, cluster and threads.
      mesh: the devices.
      out_avals: shapes and types of the results.
      aliases: results that are the memory of an operand, as {result: operand}.
      has_start_barrier: no device starts the kernel before all have come to it.
      target: the GPU that it is for; None for one that has all that any has.
      flaws: what is wrong with it whatever it is run on; `prepare` adds what it finds.
    """

    name: str
    jaxpr: Any
    pallas_mesh: Any
    mesh: DeviceMesh
    out_avals: list[Any]
    aliases: dict[int, int]
    has_start_barrier: bool = True
    target: Target | None = H100
    flaws: list[Flaw] = field(default_factory=list)

    @cached_property
    def _prepared(self) -> tuple[KernelInfo, Program]:
        if any(is_semaphore(v.aval) for v in self.jaxpr.invars):
            raise UnsupportedKernelError(
                f"kernel {self.name} takes semaphores as operands; the simulator knows those that a"
                " kernel allocates itself."
            )
        check_primitives(self.name, self.jaxpr, self.target)
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        kernel = KernelInfo(self.name, self.pallas_mesh, sizes)
        return kernel, Compiler(kernel, self.jaxpr).program

    def prepare(self) -> None:
        """Prepares the body, so that unknown operations are reported at once."""
        kernel, _ = self._prepared
        self.flaws += over_limits(kernel, self.jaxpr, self.target or H100)

    @property
    def communicates(self) -> bool:
        """Whether it asks where its device is among others, or reaches another one."""
        return self._prepared[0].communicates

    def run(
        self, operands: list[list[np.ndarray]], settings: Settings, report: Report
    ) -> list[list[np.ndarray]]:
        """Runs the kernel on all devices.

        Args:
          operands: for each device, its operands.
          settings: how to run.
          report: what is found is added to it.

        Returns:
          For each device, its results.

        Raises:
          DeadlockError: nothing can move any more.
          FindingError: the kernel ended and did something wrong, unless `settings` say to go on.
        """
        kernel, program = self._prepared
        scheduler = Scheduler(settings.schedule, settings.order_seed, settings.limits.max_steps)
        machine = Machine(
            kernel, program, self.mesh, scheduler=scheduler, report=report,
            limits=settings.limits, detect_races=settings.detect_races,
            check_hardware=settings.check_hardware,
            cost=settings.cost_model, trace=settings.trace,
            has_start_barrier=self.has_start_barrier, mail=settings.mail,
        )  # fmt: skip
        known = len(report.findings)
        for flaw in self.flaws if settings.check_hardware else ():
            flaw.tell(report)
        try:
            with np.errstate(all="ignore"):
                for device, values in zip(machine.devices, operands, strict=True):
                    self._fill(device, values)
                machine.add_blocks()
                scheduler.run()
        except SimulationError as error:
            error.report = report
            raise
        finally:
            peers.explain(machine, machine.detector.suspects)
            report.launches += 1
            if report.trace is not None:
                report.trace.next_launch()
            report.statistics.steps += scheduler.steps
        self._settle(machine, settings, known)
        n_in = len(operands[0])
        return [[np.array(b.data) for b in d.buffers[n_in:]] for d in machine.devices]

    def _settle(self, machine: Machine, settings: Settings, known: int) -> None:
        """What is to be said once nothing runs any more."""
        report = machine.report
        if (text := describe_deadlock(machine)) is not None:
            report.deadlock = text
            new = report.findings[known:]
            if new:
                text += "\nBefore it, this was found:\n" + "\n".join(map(str, new))
            raise _with_report(DeadlockError(text), report)
        machine.checks.at_end()
        seconds, busy = machine.cost.finish()
        report.statistics.predicted_seconds += seconds
        report.statistics.matmul_busy_seconds += busy
        new = report.findings[known:]
        if new and settings.on_finding == "raise":
            run = f"kernel {self.name}, seed {settings.seed} ({settings.schedule})"
            text = f"{run}: " + "\n".join(map(str, new))
            raise _with_report(FindingError(text), report)

    def _fill(self, device: Device, operands: list[np.ndarray]) -> None:
        """The global memory of one device: operands as given, results as fresh memory."""
        names = self._buffer_names(len(operands))
        for i, value in enumerate(operands):
            device.buffers.append(_global(np.array(value), names[i], device, i, True))
        of_results = {*self.aliases.values()}
        device.operands = [b for i, b in enumerate(device.buffers) if i not in of_results]
        for i, aval in enumerate(self.out_avals):
            if i in self.aliases:
                device.buffers.append(device.buffers[self.aliases[i]])
                continue
            number = len(operands) + i
            fresh = poison(tuple(aval.shape), aval.dtype)
            device.buffers.append(_global(fresh, names[number], device, number, False))

    def _buffer_names(self, num_operands: int) -> list[str]:
        """What the kernel calls its operands and results, where its source says so."""
        names = [f"input {i}" for i in range(num_operands)]
        names += [f"output {i}" for i in range(len(self.out_avals))]
        eqns = self.jaxpr.eqns
        if eqns and eqns[0].primitive.name == "run_scoped":
            body = eqns[0].params["jaxpr"]
            known = parameter_names(body.debug_info.func_src_info)
            # Scratch may be given by name, as in `stretto.distributed.kernel`.
            if len(known) in (len(names), len(names) + len(body.invars)):
                return list(known[: len(names)])
        return names


def _global(data: np.ndarray, name: str, device: Device, key: int, written: bool) -> Buffer:
    return Buffer(
        data, name=name, space="gmem", device=device.index, block=None, key=key, written=written
    )


def _with_report(error: SimulationError, report: Report) -> SimulationError:
    error.report = report
    return error
