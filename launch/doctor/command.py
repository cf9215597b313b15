"""``stretto doctor``: run all checks, show what they found, exit 1 if something stops jobs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff

from stretto.launch import environment
from stretto.launch.doctor.finding import Finding, count, error
from stretto.launch.doctor.gpu import judge_driver, judge_links, query_gpus, query_links
from stretto.launch.doctor.heap import check_heap
from stretto.launch.doctor.host import check_host
from stretto.launch.doctor.jax_devices import check_jax
from stretto.launch.doctor.mpi import check_mpi
from stretto.launch.doctor.nccl import check_nccl
from stretto.launch.doctor.peers import check_peers
from stretto.launch.doctor.software import check_software
from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class DoctorOptions:
    """List what this machine can do, and its faults. Exit status 1 on errors."""

    json: FlagCreatePairsOff[bool] = False
    """Print the findings as JSON."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    options = tyro.cli(DoctorOptions, args=argv, prog="stretto doctor")
    findings = examine()
    if options.json:
        print(as_json(findings))
    else:
        show(findings, Console())
    return 1 if count(findings, "error") else 0


def examine() -> list[Finding]:
    """All findings about this machine, in the order they are shown."""
    usable, unusable = 0, []
    try:
        usable = len(gpus.usable_gpus(environment.current()))
    except LaunchError as problem:
        text, _, way_out = str(problem).partition("; ")
        unusable.append(error("gpus", text, way_out))
    checks: list[Callable[[], list[Finding]]] = [
        check_software,
        check_host,
        check_mpi,
        check_gpus,
        lambda: check_jax(usable),
        lambda: check_peers(usable),
        lambda: check_heap(usable),
        lambda: check_nccl(usable),
    ]
    return [*unusable, *(finding for check in checks for finding in run_check(check))]


def check_gpus() -> list[Finding]:
    """Driver, GPUs and NVLink."""
    states, answer = query_gpus()
    return [*judge_driver(states, answer), *(judge_links(query_links()) if states else [])]


def run_check(check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check's findings; its own failure is one, so that the others still run."""
    try:
        return check()
    except Exception as problem:
        name = getattr(check, "__name__", "check")
        text = f"{name} failed: {type(problem).__name__}: {problem}"
        return [error("doctor", text, "report this as a bug of Stretto")]


def as_json(findings: Sequence[Finding]) -> str:
    """``{"errors": 0, "warnings": 1, "findings": [{topic, level, text, way_out}, ...]}``."""
    report = {
        "errors": count(findings, "error"),
        "warnings": count(findings, "warning"),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2)


def show(findings: Sequence[Finding], console: Console) -> None:
    """The findings as a table, and their sum."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in ("level", "topic", "text"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.way_out:
            text.append(f"\n→ {finding.way_out}", style="bold")
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, finding.topic, text)
    console.print(table)
    errors, warnings = count(findings, "error"), count(findings, "warning")
    console.print(f"{errors} errors, {warnings} warnings", style="bold")
