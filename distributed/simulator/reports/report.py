"""What a simulation found out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from stretto.distributed.simulator.reports.statistics import Statistics
from stretto.distributed.simulator.reports.trace import Trace
from stretto.distributed.sites import Site


@dataclass
class Finding:
    """An error of the kernel, or a likely mistake.

    Attributes:
      kind: "race", "unordered tensor cores", "uninitialised", "uncommitted store",
        "unawaited copy", "message overwritten", "operand written", "after end", "before start",
        "semaphore scope", or "semaphore not zero".
      key: what makes two findings the same.
      message: the whole story, with source lines.
      sites: the source lines, in the order of the report.
      is_warning: legal on today's devices, so it fails no run.
      count: how often it was seen.
      launch: which launch of the simulation it is from, from 0.
      notes: what the rest of the run tells about it, such as a peer that may be wrong.
    """

    kind: str
    key: Hashable
    message: str
    sites: tuple[Site, ...] = ()
    is_warning: bool = False
    count: int = 1
    launch: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        times = f" (seen {self.count} times)" if self.count > 1 else ""
        return "\n  ".join((f"[{self.kind}] {self.message}{times}", *self.notes))


@dataclass
class Report:
    """Everything that the kernels run under one `simulate` did.

    Attributes:
      seed: the seed of the run.
      schedule: the order of steps that it ran in.
      from_the_end: kernels of `kernel.launch` counted their devices from the end.
      findings: what would be wrong on a device: races, reads of uninitialised memory, and so on.
      warnings: legal but suspicious, such as semaphores left above zero.
      launches: number of kernel launches simulated, over all teams.
      nested_launches: launches under a `simulate` inside this one, which has its own report.
      nested_failures: how many such simulations found something wrong.
      output: lines that kernels printed with `debug_print`.
      statistics: bytes, copies, waits and steps, summed over the launches.
      trace: the steps of every task, with `trace=True`.
      deadlock: the text of the deadlock, if there was one.
      failure: what else ended the run before it was done, such as a fault of the kernel or an
        exception of the script: nothing is known of what would have come.
    """

    seed: int = 0
    schedule: str = "random"
    from_the_end: bool = False
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    launches: int = 0
    nested_launches: int = 0
    nested_failures: int = 0
    output: list[str] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    deadlock: str | None = None
    failure: str | None = None
    trace: Trace | None = None
    _seen: dict[Hashable, Finding] = field(default_factory=dict, repr=False)

    def add(self, finding: Finding) -> bool:
        """Adds a finding, or counts it if it is known; whether it is new."""
        known = self._seen.get(finding.key)
        if known is not None:
            known.count += 1
            return False
        finding.launch = self.launches
        self._seen[finding.key] = finding
        (self.warnings if finding.is_warning else self.findings).append(finding)
        return True

    @property
    def ok(self) -> bool:
        """Whether the run reached its end without a finding (warnings apart)."""
        return not self.findings and self.deadlock is None and self.failure is None

    def fail(self, failure: str) -> None:
        """Notes what ended the run; the first counts."""
        self.failure = self.failure or failure

    @property
    def title(self) -> str:
        """The seed and schedule of the run, with which to repeat it."""
        order = ", devices counted from the end" if self.from_the_end else ""
        return f"simulation, seed {self.seed} ({self.schedule}{order})"

    def kinds(self) -> set[str]:
        """The kinds of the findings."""
        return {f.kind for f in self.findings}

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.launches} kernel launches"]
        lines += [text for text in (self.deadlock, self.failure) if text]
        lines += [str(f) for f in (*self.findings, *self.warnings)]
        if self.ok:
            lines.append("nothing wrong found")
        if self.launches:
            lines.append(str(self.statistics))
        return "\n".join(lines)
