"""What tests run on: eight CPU devices or, for `pytest tests/gpu` alone, the GPUs of the machine.

JAX chooses its platform once a process, so GPU tests and CPU tests do not share one. With
`--rehearse`, tests/gpu runs on four of the CPU devices, small and simulated.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"
AOT_TESTS = Path(__file__).parent / "aot"
CPU_DEVICES = 8
REHEARSED_GPUS = 4
PROCESSES_TIMES_GPUS = 12

with contextlib.suppress(ImportError):  # tests/gpu does without it
    import hypothesis

    # The same examples on every run; how long one takes depends on the machine.
    hypothesis.settings.register_profile("stretto", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("stretto")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="run tests/gpu without GPUs: small, in the simulator, to find mistakes in the tests",
    )
    parser.addoption(
        "--nccl",
        metavar="FILE",
        help="libnccl.so.2, 2.29 or newer, for the tests with a process per GPU (tests/gpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out unless --slow is given")
    config.addinivalue_line("markers", "gpu(n): needs n (default 1) GPUs; see tests/gpu")
    config.addinivalue_line("markers", "real: cannot be rehearsed without GPUs")
    config.addinivalue_line(
        "markers", "one_process: starts processes, simulates, or takes devices as it likes"
    )
    config.addinivalue_line("markers", "compiles: what is simulated is lowered for GPUs, too")
    config.addinivalue_line("markers", "optimised: what is compiled is optimised, as users have it")
    config.addinivalue_line("markers", "timeout(seconds): limit of a test, by pytest-timeout")
    on_gpus = _only_gpu_tests(config) and not config.getoption("--rehearse")
    if on_gpus and _number_of_gpus():
        # The CPU as well: callbacks need it, and the simulator. No silent fall back on it.
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        # Several processes share the GPUs: workers of pytest-xdist, and what tests start.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif not on_gpus:
        # The processes that tests start inherit the variable, but not the number of devices.
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    if _job_processes() > 1:
        import processes

        processes.join()
        return
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: fewer processes the more GPUs they share, on all of which a kernel takes turns."""
    gpus = _number_of_gpus()
    if not gpus or config.getoption("--rehearse") or not _only_gpu_tests(config):
        return None  # xdist's own choice
    return max(1, min(PROCESSES_TIMES_GPUS // gpus, len(os.sched_getaffinity(0))))


@pytest.fixture(autouse=True)
def only_simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated kernels are not lowered for GPUs as well: it takes long, and tests/aot does it."""
    if request.node.get_closest_marker("compiles") is None:
        from stretto.distributed.private_jax import lowering

        monkeypatch.setattr(lowering, "is_possible", lambda: False)


@pytest.fixture(autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA's programs, which run once, are compiled for CPUs without LLVM's expensive passes.

    They are the same programs: the passes of XLA that choose and move operations all run. Compilers
    for GPUs read the option, too, so that tests of what those make are marked `optimised`.
    """
    import jax

    unoptimised = request.node.get_closest_marker("optimised") is None
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", unoptimised)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def traces_apart() -> Iterator[None]:
    """The test's traces are its own: what is traced with a bug is used by no other test."""
    import traces

    with traces.apart():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items:
        if {GPU_TESTS, AOT_TESTS} & set(item.path.parents):
            item.add_marker(pytest.mark.optimised)
        if GPU_TESTS in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            left_out.append(item)
        if (marker := item.get_closest_marker("gpu")) is not None:
            needed = marker.args[0] if marker.args else 1
            if reason := _why_no_gpus(config, needed):
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("one_process") and _job_processes() > 1:
            item.add_marker(pytest.mark.skip(reason="is for one process, not for a job of several"))
        if item.get_closest_marker("real") and config.getoption("--rehearse"):
            item.add_marker(pytest.mark.skip(reason="needs real GPUs; cannot be rehearsed"))
    if left_out:
        # Left out here, not skipped: each test that is skipped costs a message of a worker.
        config.hook.pytest_deselected(items=left_out)
        slow = set(left_out)
        items[:] = [item for item in items if item not in slow]


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    return None if config.getoption("--slow") else "`pytest --slow` runs the slow tests, too"


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay: no collection of garbage need look at them again."""
    gc.collect()
    gc.freeze()


def _only_gpu_tests(config: pytest.Config) -> bool:
    """Whether the command line asks for nothing but tests/gpu or something in it."""
    paths = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return bool(paths) and all(path == GPU_TESTS or GPU_TESTS in path.parents for path in paths)


def _why_no_gpus(config: pytest.Config, needed: int) -> str | None:
    """Why a test that needs `needed` GPUs cannot run here, or None if it can."""
    rehearsing = config.getoption("--rehearse")
    found = REHEARSED_GPUS if rehearsing else _number_of_gpus()
    if _job_processes() > 1:  # Each has one device, also where they share a GPU.
        found = _job_processes()
    if found < needed:
        return f"needs {needed} GPU(s), and this machine has {found or 'none'}"
    if not rehearsing and not _only_gpu_tests(config):
        return "runs apart from the CPU tests: `pytest tests/gpu`"
    return None


def _job_processes() -> int:
    """How many processes run these tests together, by `stretto run`; 1 outside a job."""
    return int(os.environ.get("STRETTO_NUM_PROCESSES", "1"))


@functools.cache
def _number_of_gpus() -> int:
    """NVIDIA GPUs of this machine, found without JAX, whose platform may not be chosen yet."""
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.stdout.count("UUID: GPU-")
