"""The report of a deadlock: who waits for what, and who could have helped."""

from __future__ import annotations

from typing import Any

_SHOWN = 24


def describe_deadlock(machine: Any) -> str | None:
    """The text of the deadlock that `machine` is in; None if every task has ended."""
    blocked = [t for t in machine.tasks if t.waiting is not None]
    queued = [(d, len(d.waiting_blocks)) for d in machine.devices if d.waiting_blocks]
    if not blocked and not queued:
        return None
    lines = [
        f"deadlock in kernel {machine.kernel.name}: nothing can move after"
        f" {machine.scheduler.steps} steps; {len(blocked)} tasks wait."
    ]
    groups: dict[tuple, list[Any]] = {}
    for task in blocked:
        groups.setdefault((task.waiting.site, task.waiting.describe()), []).append(task)
    for (site, what), tasks in list(groups.items())[:_SHOWN]:
        who = "; ".join(t.describe() for t in tasks[:4])
        more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
        lines.append(f"  {who}{more}\n    waits for {what}\n    at {site}")
        if helpers := tasks[0].waiting.helpers():
            lines.append(f"    {helpers}")
    if len(groups) > _SHOWN:
        lines.append(f"  ... and {len(groups) - _SHOWN} more waits")
    for device, count in queued[:_SHOWN]:
        lines.append(
            f"  {device.describe()}: {count} of {len(device.blocks)} blocks have not started:"
            f" only resident_blocks={machine.limits.resident_blocks} run at once, and those wait."
            " Blocks that wait for each other must all be resident: launch a smaller grid."
        )
    return "\n".join(lines)
