"""What stands in for a GPU, and for JAX's interpreter, while test files of JAX run.

The one place that changes JAX for them. They run on CPU devices, in the simulator, and are to take
these for H100s or B200s:

- `jax._src.test_util`: the device is a GPU of CUDA, of the target's capability, with CUDA 13. The
  files of the interpreter are for a CPU, and do not get this.
- Devices say how much shared memory a block may have.
- `jax._src.lib.cuda_versions`: it can multicast, and its runtime is 13.0.
- The extension of Mosaic GPU, which is asked to wait for output, has nothing to wait for.
- `interpret=InterpretParams(...)` and `force_gpu_interpret_mode(...)` of a test do nothing, since
  the simulator is there instead; `get_races()` says whether it has found anything.
- `pl.pallas_call`, which the interpreter takes, is JAX's own stand-in, made of `plgpu.kernel`.

And the simulator prints what kernels print without saying who did, as a GPU does.
"""

from __future__ import annotations

import contextlib
import types
import unittest
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax._src.lib
from jax._src import test_util
from jax._src.lib import mosaic_gpu
from jax._src.pallas.mosaic_gpu import pallas_call as pallas_call_of_kernel
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import pallas as pl

import stretto
from stretto.distributed.simulator import Report
from stretto.distributed.simulator.machine import Machine

CAPABILITIES = {"h100": 9.0, "b200": 10.0}
CORES = 4  # Blocks of a B200 that run at once; tests that claim others count on that.
SMEM_BYTES = 232_448
MAX_STEPS = 200_000

_reports: list[Report] = []
_asked: list[bool] = []


def install(*, as_gpu: bool, target: str) -> None:
    """Changes JAX for the process; before a test file is imported.

    Args:
      as_gpu: the file is for GPUs, and is to find one.
      target: the GPU that it finds.
    """
    capability = CAPABILITIES[target]
    if as_gpu:
        test_util.is_device_cuda = lambda: True
    test_util.is_cuda_compute_capability_at_least = lambda least: float(least) <= capability
    test_util.is_cuda_compute_capability_equal = lambda exact: float(exact) == capability
    test_util.is_cuda_version_at_least = lambda major, minor: (major, minor) <= (13, 0)
    has_tensor_memory = as_gpu and target == "b200"
    test_util.CudaArchSpecificTest.skip_unless_tcgen05 = _nothing if has_tensor_memory else _skip
    type(jax.local_devices()[0]).shared_memory_per_block_optin = SMEM_BYTES
    jax._src.lib.cuda_versions = types.SimpleNamespace(
        cuda_supports_multicast=lambda device: True, cuda_runtime_get_version=lambda: 13000
    )
    mosaic_gpu._mosaic_gpu_ext = types.SimpleNamespace(_sync_all_devices=lambda: None)
    interpret_pallas_call.get_races = _races
    pl.pallas_call = _pallas_call
    Machine.print = _print


def adopt(module: Any) -> None:
    """Has a test file, once imported, use the simulator where it asks for JAX's interpreter."""
    for name, value in {
        "InterpretParams": _no_interpreter,
        "force_gpu_interpret_mode": lambda *_: contextlib.nullcontext(),
    }.items():
        if hasattr(module, name):
            setattr(module, name, value)


@contextlib.contextmanager
def simulating(target: str) -> Generator[Report]:
    """Runs one test; what the simulator finds is kept, and does not fail a kernel.

    Kernels are not lowered for a GPU: those for JAX's interpreter need not be such as a GPU runs.
    """
    with stretto.simulate(
        target=target,
        core_count=CORES,
        resident_blocks=CORES if target == "b200" else None,
        on_finding="record",
        max_steps=MAX_STEPS,
        rendezvous_timeout=20,
        check_hardware=False,
    ) as report:
        _reports[:] = [report]
        _asked.clear()
        yield report


def was_asked() -> bool:
    """Whether the test that ran last has asked what the simulator found."""
    return bool(_asked)


def _skip(test: Any) -> None:
    test.skipTest("for Blackwell")


def _nothing(test: Any) -> None:
    """A test of what Blackwell has, on one."""


def _no_interpreter(*, skip_floating_point_ops: bool = False, **_: Any) -> bool:
    if skip_floating_point_ops:
        raise unittest.SkipTest("leaves out what the simulator is to compute")
    return False


def _races() -> Any:
    """Reading memory that nobody has written is no race to JAX."""
    _asked.append(True)
    kinds = _reports[-1].kinds() - {"uninitialised"}
    return types.SimpleNamespace(races_found=bool(kinds))


def _pallas_call(
    kernel: Callable, out_shape: Any = None, *, interpret: Any = None, debug: bool = False,
    **settings: Any,
) -> Callable:  # fmt: skip
    del interpret, debug
    return pallas_call_of_kernel.pallas_call(kernel, out_shape, **settings)


def _print(machine: Machine, task: Any, text: str) -> None:
    machine.report.output.append(text)
    print(text)
