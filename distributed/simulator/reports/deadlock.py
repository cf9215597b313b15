"""The report of a deadlock: who waits for what, and who could have helped."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.reports.words import devices
from stretto.distributed.sites import Site, is_kernel_code

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
    own = [t for t in blocked if _is_own(t.waiting)]
    groups: dict[tuple, list[Any]] = {}
    for task in own or blocked:
        groups.setdefault((task.waiting.site, task.waiting.describe()), []).append(task)
    for (site, what), tasks in list(groups.items())[:_SHOWN]:
        lines.append(f"  {_who(tasks)}\n    waits for {what}\n    at {site}")
        if helpers := tasks[0].waiting.helpers():
            lines.append(f"    {helpers}")
    if len(groups) > _SHOWN:
        lines.append(f"  ... and {len(groups) - _SHOWN} more waits")
    around: dict[str, list[Any]] = {}
    for task in blocked if own else ():
        if not _is_own(task.waiting):
            around.setdefault(_around_body(task.waiting), []).append(task)
    lines += [f"  {_who(tasks)}\n    {what}" for what, tasks in around.items()]
    for device, count in queued[:_SHOWN]:
        lines.append(
            f"  {device.describe()}: {count} of {len(device.blocks)} blocks have not started:"
            f" only resident_blocks={machine.limits.resident_blocks} run at once, and those wait."
            " Blocks that wait for each other must all be resident: launch a smaller grid."
        )
    lines += _astray(machine, own)
    return "\n".join(lines)


def _who(tasks: list[Any]) -> str:
    """Tasks in words, the first four by name."""
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    return "; ".join(t.describe() for t in tasks[:4]) + more


def _is_semaphore(on: Any) -> bool:
    """Whether what is waited for is a semaphore, and not a barrier or a copy."""
    return hasattr(on, "signalled_by")


def _is_own(wait: Any) -> bool:
    """Whether a wait is the kernel's own, and not one of `kernel.launch` around its body."""
    on = wait.on
    return not _is_semaphore(on) or not on.array.is_of_launch or is_kernel_code(wait.site)


def _around_body(wait: Any) -> str:
    """What a wait of `kernel.launch` before or after the body means."""
    if wait.on.array.name == "closing":
        return "has ended its body, and kernel.launch waits there for a peer that has not."
    return "has not begun its body: kernel.launch waits there for a peer that has not started."


def who_signals(semaphore: Any, sites: list[Site]) -> str:
    """Who has signalled a semaphore so far, and at which of the kernel's lines it is signalled."""
    by_site: dict[Site, list[str]] = {}
    for (_, who, site), times in semaphore.signalled_by.items():
        by_site.setdefault(site, []).append(f"{who} x{times}")
    told = "; ".join(f"at {site} by {', '.join(who)}" for site, who in by_site.items())
    told = f"signalled so far {told}" if told else "nobody has signalled it"
    others = [i for i in semaphore.array.items if i.total > i.needed and i is not semaphore]
    if others and not by_site:
        got = (f"{i.name} has got {i.total} where waits want {i.needed}" for i in others[:4])
        told += f", but {', '.join(got)}"
    if not sites:
        return f"{told}. Signals of it in the kernel: no signal of it is in the kernel"
    more = [str(site) for site in sites if site not in by_site]
    return f"{told}. Signals of it in the kernel: {'; '.join(more)}" if more else told


def _astray(machine: Any, tasks: list[Any]) -> list[str]:
    """Signals to devices that want no more, of semaphores for which `tasks` of others wait."""
    stuck = {t.device.index for t in tasks}
    lines: dict[tuple, str] = {}
    for semaphore in (t.waiting.on for t in tasks if _is_semaphore(t.waiting.on)):
        key = semaphore.array.key
        for device in machine.devices:
            if device.index in stuck or key not in device.semaphores:
                continue
            item = device.semaphores[key].items[semaphore.index]
            if item.total <= item.needed:
                continue
            sites = "; ".join(dict.fromkeys(str(s) for *_, s in item.signalled_by))
            text = (
                f"  Semaphore {item.name} of device {device.index} has got {item.total}, and waits"
                f" for it want {item.needed or 'nothing'}:"
                f" {devices(d for d, *_ in item.signalled_by)} signalled it, at {sites}. Is"
                " the peer of a signal wrong?"
            )
            lines.setdefault((key, sites), text)
    return list(lines.values())
