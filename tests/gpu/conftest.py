"""What the GPU tests share: a mesh, how much to do, the count of what was found, the summary.

Checks that the tests of the kernels use as well, in the simulator, lie in `tests/kernels`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import fused_cases as cases
import jax
import machine
import patience
import processes
import pytest
import scale as scales
import tally as tallies

import stretto as st
from stretto.distributed import settings

HERE = Path(__file__).parent
MOST_DEVICES = 8


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test on GPUs has a limit. Its own, if it has one, comes first."""
    if config.getoption("--rehearse"):
        return
    # A thread ends the process: a signal does not reach one that waits for a GPU.
    limit = pytest.mark.timeout(patience.shared(patience.TEST_S), method="thread")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(limit)


@pytest.fixture(scope="session")
def rehearsing(pytestconfig: pytest.Config) -> bool:
    return pytestconfig.getoption("--rehearse")


@pytest.fixture(scope="session")
def scale(rehearsing: bool) -> scales.Scale:
    if rehearsing and processes.COUNT > 1:  # Nothing is simulated over several processes.
        return dataclasses.replace(scales.REHEARSAL, backend="xla")
    return scales.REHEARSAL if rehearsing else scales.FULL


@pytest.fixture(scope="session")
def mesh(rehearsing: bool) -> jax.sharding.Mesh:
    """All GPUs of the machine, up to eight, along "x"."""
    simulated = rehearsing and processes.COUNT == 1
    return cases.mesh_of(4 if simulated else min(len(jax.devices()), MOST_DEVICES))


@pytest.fixture
def tally(record_property) -> tallies.Tally:
    return tallies.Tally(record_property)


@pytest.fixture(autouse=True)
def patient_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of this process, and of those that a test starts, wait as long as sharing asks."""
    usual = settings.DEFAULT_WAIT_LIMIT_S
    if settings.WAIT_LIMIT_VARIABLE not in os.environ:
        monkeypatch.setenv(settings.WAIT_LIMIT_VARIABLE, str(patience.shared(usual)))


@pytest.fixture(autouse=True)
def simulation(rehearsing: bool) -> Iterator[None]:
    """Kernels run in the simulator if this is a rehearsal."""
    if not rehearsing or processes.COUNT > 1:
        yield
        return
    with st.simulate(seed=6, core_count=2, detect_races=False):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Stops the run once the GPUs answer no more: every test after that would fail, slowly."""
    report = yield
    if report.failed and HERE in item.path.parents and not machine.devices_answer():
        item.session.shouldstop = "the GPUs answer no more: a kernel stopped them (see above)"
    return report


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    reports = [
        report
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, ())
        if report.nodeid.startswith("tests/gpu/") and report.when == "call"
    ]
    if not reports:
        return
    terminalreporter.section("GPU check")
    kinds = ("passed", "failed", "error", "skipped")
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in kinds}
    lines = [
        *machine.describe(
            rehearsed=config.getoption("--rehearse"), nccl=config.getoption("--nccl")
        ),
        ("tests", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)),
        *tallies.summarise(p for report in reports for p in report.user_properties),
        ("seed", f"of the stress tests: {scales.FULL.plan.seed}"),
    ]
    width = max(len(heading) for heading, _ in lines)
    for heading, text in lines:
        terminalreporter.write_line(f"{heading:<{width}}  {text}")
