"""What tests run on: eight CPU devices or, for `pytest tests/gpu` alone, the GPUs of the machine.

JAX chooses its platform once a process, so GPU tests and CPU tests do not share one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"
CPU_DEVICES = 8

with contextlib.suppress(ImportError):  # tests/gpu does without it
    import hypothesis

    # The same examples on every run; how long one takes depends on the machine.
    hypothesis.settings.register_profile("stretto", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("stretto")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out unless --slow is given")
    config.addinivalue_line("markers", "gpu(n): needs n (default 1) GPUs; see tests/gpu")
    if not _only_gpu_tests(config):
        # The processes that tests start inherit the variable, but not the number of devices.
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; `pytest --slow` runs it"))
        if (marker := item.get_closest_marker("gpu")) is not None:
            needed = marker.args[0] if marker.args else 1
            if reason := _why_no_gpus(config, needed):
                item.add_marker(pytest.mark.skip(reason=reason))


def _only_gpu_tests(config: pytest.Config) -> bool:
    """Whether the command line asks for nothing but tests/gpu or something in it."""
    paths = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return bool(paths) and all(path == GPU_TESTS or GPU_TESTS in path.parents for path in paths)


def _why_no_gpus(config: pytest.Config, needed: int) -> str | None:
    """Why a test that needs `needed` GPUs cannot run here, or None if it can."""
    if (found := _number_of_gpus()) < needed:
        return f"needs {needed} GPU(s), and this machine has {found or 'none'}"
    if not _only_gpu_tests(config):
        return "runs apart from the CPU tests: `pytest tests/gpu`"
    return None


@functools.cache
def _number_of_gpus() -> int:
    """NVIDIA GPUs of this machine, found without JAX, whose platform may not be chosen yet."""
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.stdout.count("UUID: GPU-")
