"""The operations and waits of every task, for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took a while.

    Attributes:
      device: linear index of the device.
      row: who did it, in words; a row of the picture.
      what: what it was.
      begin, end: in seconds by the cost model, or in steps of the scheduler without one.
    """

    device: int
    row: str
    what: str
    begin: float
    end: float


@dataclass
class Trace:
    """The events of a simulation, launch after launch.

    Attributes:
      events: in the order in which they ended.
      is_timed: begin and end are seconds, not steps.
    """

    events: list[Event] = field(default_factory=list)
    is_timed: bool = False
    _origin: float = 0.0
    _latest: float = 0.0

    def add(self, device: int, row: str, what: str, begin: float, end: float) -> None:
        """Adds an event of the present launch."""
        begin, end = begin + self._origin, end + self._origin
        self._latest = max(self._latest, end)
        self.events.append(Event(device, row, what, begin, end))

    def next_launch(self) -> None:
        """What follows belongs to another launch, which starts when the last one ended."""
        self._origin = self._latest

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON for Perfetto; a step is drawn as a microsecond."""
        scale = 1e6 if self.is_timed else 1.0
        rows: dict[tuple[int, str], int] = {}
        out: list[dict[str, Any]] = []
        for event in self.events:
            row = rows.setdefault((event.device, event.row), len(rows))
            out.append(
                {
                    "name": event.what,
                    "ph": "X",
                    "pid": event.device,
                    "tid": row,
                    "ts": event.begin * scale,
                    "dur": max(event.end - event.begin, 0.0) * scale,
                }
            )
        names = [_name("process_name", d, 0, f"device {d}") for d in sorted({d for d, _ in rows})]
        names += [_name("thread_name", d, row, text) for (d, text), row in rows.items()]
        Path(path).write_text(json.dumps({"traceEvents": names + out}))


def _name(kind: str, device: int, row: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": device, "tid": row, "args": {"name": text}}
