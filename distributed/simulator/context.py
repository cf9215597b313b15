"""`simulate`: the context in which kernels run in the simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Generator
from typing import Any, Literal

import jax

from stretto.distributed import simulating
from stretto.distributed.by_name import by_name
from stretto.distributed.primitives import cpu_kernels
from stretto.distributed.private_jax import (
    callbacks,
    cores,
    lowering,
    pallas_call,
)
from stretto.distributed.simulator.launch import KernelCall
from stretto.distributed.simulator.machine import Limits
from stretto.distributed.simulator.refusals.lowering import flaw_of
from stretto.distributed.simulator.rendezvous import Activity, Rendezvous
from stretto.distributed.simulator.reports.errors import (
    DeadlockError,
    FindingError,
    SimulationError,
    UnsupportedKernelError,
)
from stretto.distributed.simulator.reports.report import Report
from stretto.distributed.simulator.reports.trace import Trace
from stretto.distributed.simulator.settings import Settings, check_integers, schedule_of
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.distributed.simulator.state.mesh import DeviceMesh
from stretto.distributed.targets import target_of


class _Simulation:
    """The state of one `simulate`."""

    def __init__(self, settings: Settings, report: Report):
        self.settings = settings
        self.report = report
        self.error: BaseException | None = None
        self._rendezvous: dict[KernelCall, Rendezvous] = {}
        self._making = threading.Lock()
        self._running = threading.Lock()
        self._activity = Activity()

    def rendezvous_of(self, kernel: KernelCall) -> Rendezvous:
        """The rendezvous of the devices for `kernel`, in this simulation alone."""
        with self._making:
            if kernel not in self._rendezvous:
                self._rendezvous[kernel] = Rendezvous(
                    kernel.name,
                    kernel.mesh.num_devices,
                    kernel.mesh.describe,
                    functools.partial(self._run, kernel),
                    self._note_error,
                    timeout=self.settings.rendezvous_timeout,
                    activity=self._activity,
                )
            return self._rendezvous[kernel]

    def _run(self, kernel: KernelCall, number: int, operands: list[list[Any]]) -> list[list[Any]]:
        with self._running:
            settings = self.settings.for_launch(kernel.name, number)
            return kernel.run(operands, settings, self.report)

    def _note_error(self, error: BaseException) -> None:
        self.error = self.error or error
        if not isinstance(error, DeadlockError | FindingError):  # These the report has.
            self.report.fail(f"{type(error).__name__}: {error}")


# Devices come on XLA's threads, so what they use is global, not per thread. A program that another
# thread had running when its `simulate` ended finishes under the settings it started with.
_active: list[_Simulation] = []
_last: list[_Simulation] = []
# Kernels with `interpret=SimulatorParams()` that run before any `simulate` share this one.
_outside = _Simulation(Settings(), Report())


@dataclasses.dataclass(frozen=True)
class SimulatorParams:
    """Given as `interpret=` to `plgpu.kernel`, makes that one kernel run in the simulator.

    Outside of `simulate` it runs with the default settings.
    """


@by_name
@contextlib.contextmanager
def simulate(
    *,
    seed: int = 0,
    schedule: Literal["rotating", "random", "round_robin", "pct", "time"] = "rotating",
    target: str = "h100",
    from_the_end: bool = False,
    detect_races: bool = True,
    resident_blocks: int | None = None,
    core_count: int = 4,
    check_hardware: bool = True,
    on_finding: Literal["raise", "record"] = "raise",
    max_steps: int = 50_000_000,
    cost_model: CostModel | None = None,
    trace: bool = False,
    rendezvous_timeout: float = 60.0,
) -> Generator[Report]:
    """Runs the Mosaic GPU kernels that are called inside it in the simulator, on CPU devices.

    Works under `jit`, `shard_map` and transformations, on unchanged kernels. An error in a kernel
    leaves this context as a `SimulationError`; inside the context JAX raises its own error, which
    contains the text.

    Args:
      seed: of the order of steps. The same seed gives the same run, bit for bit.
      schedule: "random", "round_robin", "pct" (favours orders that are rare), "time" (the order of
        the cost model's clock), or "rotating": "pct" for even seeds, "random" for odd ones.
      target: the GPU that is simulated, "h100" or "b200".
      from_the_end: kernels of `kernel.launch` count their devices from the end, as they do in a job
        of several nodes.
      detect_races: detect data races, and accesses that may follow a peer's end.
      resident_blocks: blocks that a device runs at once; by default, as many as the target has
        multiprocessors.
      core_count: the value of `device.core_count` inside; CPU devices have none, and kernels size
        their grids by it.
      check_hardware: report kernels that no such GPU runs: those that JAX does not lower for it,
        that exceed its limits, or that copy from a misaligned address. Without it a kernel may be
        for the simulator alone, such as one on very small arrays.
      on_finding: "raise" fails a launch with findings once it has ended, "record" only adds them to
        the report.
      max_steps: the most steps of one launch; more are an error.
      cost_model: predicts times; sets the schedule to "time".
      trace: record the steps of every task in `Report.trace`.
      rendezvous_timeout: seconds that devices wait for a device that does not reach a kernel.

    Yields:
      The report, which grows while kernels run.

    Raises:
      SimulationError: a kernel deadlocked, raced, or has another finding.
      ValueError: an unknown setting.
    """
    check_integers(
        seed=seed, core_count=core_count, resident_blocks=resident_blocks, max_steps=max_steps
    )
    gpu = target_of(target)
    order = "time" if cost_model is not None else schedule_of(seed, schedule)
    report = Report(seed=seed, schedule=order, from_the_end=from_the_end)
    if trace:
        report.trace = Trace(is_timed=cost_model is not None)
    settings = Settings(
        seed=seed,
        schedule=order,
        detect_races=detect_races,
        check_hardware=check_hardware,
        on_finding=on_finding,
        limits=Limits(
            resident_blocks=gpu.multiprocessors if resident_blocks is None else resident_blocks,
            max_steps=max_steps,
        ),
        cost_model=cost_model,
        trace=report.trace,
        rendezvous_timeout=rendezvous_timeout,
    )
    simulation = _Simulation(settings, report)
    _active.append(simulation)
    try:
        setting = simulating.Setting(core_count, check_hardware, from_the_end, target)
        with simulating.setting(setting), cores.cpu_core_count(core_count):
            try:
                yield report
            finally:
                callbacks.finish_programs()
    except Exception as error:
        if simulation.error is not None and not isinstance(error, SimulationError):
            raise simulation.error from error
        if error is not simulation.error:  # The others have been noted.
            report.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        _active.remove(simulation)
        if _active:
            outer = _active[-1].report
            outer.nested_launches += report.launches + report.nested_launches
            outer.nested_failures += (not report.ok) + report.nested_failures
        _last[:] = [simulation]
    if simulation.error is not None:
        raise simulation.error


def _checks_hardware() -> bool:
    setting = simulating.setting.value
    return setting is None or setting.check_hardware


def _must_lower() -> bool:
    """Whether a kernel for the simulator is lowered for GPUs, too."""
    return lowering.is_possible() and _checks_hardware()


def _intercept(call: cpu_kernels.LoweredKernel) -> Any:
    """The callback that stands for a kernel call, or None to leave the call alone."""
    if not simulating.is_simulating() and not isinstance(call.interpret, SimulatorParams):
        return None
    mesh = DeviceMesh(call.axis_names, call.axis_sizes, reverse=call.reverse)
    if jax.process_count() > 1 and mesh.num_devices > jax.local_device_count():
        raise UnsupportedKernelError(
            f"kernel {call.name} runs on {mesh.num_devices} devices, of which this process has"
            f" {jax.local_device_count()}: the simulator needs all of them in one process. Start"
            " one, with jax_num_cpu_devices set to their number."
        )
    target = simulating.target()
    kernel = KernelCall(
        call.name,
        call.jaxpr,
        call.pallas_mesh,
        mesh,
        list(call.out_avals),
        dict(call.aliases),
        has_start_barrier=not getattr(call.compiler_params, "skip_device_barrier", False),
        target=target if _checks_hardware() else None,
    )
    kernel.prepare()
    if call.unordered is not None and kernel.communicates:
        raise NotImplementedError(f"kernel {call.name}: {call.unordered}")
    if _must_lower() and not kernel.flaws:
        refusal = call.refusal(target.capability)
        if refusal is not None:
            kernel.flaws.append(flaw_of(refusal, call.name, call.jaxpr, gpu=target.title))

    def receive(visit: callbacks.Visit) -> None:
        _current().rendezvous_of(kernel).come(visit.position, visit)

    return receive


def _current() -> _Simulation:
    if _active:
        return _active[-1]
    if _last:
        return _last[-1]
    return _outside


def _why_no_pallas_call(kernel: str, for_mosaic: bool) -> UnsupportedKernelError | None:
    """Why a `pl.pallas_call` is not simulated; None outside of `simulate`."""
    if not simulating.is_simulating():
        return None
    what = (
        "with plgpu.CompilerParams is lowered for no GPU by this JAX"
        if for_mosaic
        else "makes a kernel for Triton, and the simulator runs kernels for Mosaic GPU"
    )
    return UnsupportedKernelError(
        f"kernel {kernel}: pl.pallas_call {what}; write it with plgpu.kernel, and with"
        " plgpu.emit_pipeline for what its BlockSpecs do."
    )


cpu_kernels.install_kernel_interception(_intercept)
pallas_call.refuse_pallas_calls(_why_no_pallas_call)
