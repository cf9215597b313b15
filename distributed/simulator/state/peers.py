"""Wrong peers and indices, told apart from missing waits.

A signal or a copy that goes to another device than was meant is found as a race, or as a read of
memory that nobody has written. Only the whole run shows where the signals and writes went instead.
So what is needed for it is kept beside the finding, which gets its notes at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stretto.distributed.simulator.reports.report import Finding
from stretto.distributed.simulator.reports.words import devices
from stretto.distributed.simulator.state.memory import UNWRITTEN, Region

_SHOWN = 4
"""Devices of which the writers are listed."""


@dataclass(frozen=True)
class Suspect:
    """A finding in global memory that a wrong peer may have caused.

    Attributes:
      finding: what was found.
      region: where.
      first, second: the accesses, in the order of the run; `first` is None for an unwritten read.
      waits: the last semaphores that the task of the second had waited for, the latest first.
      count: how many it had waited for.
    """

    finding: Finding
    region: Region
    first: Any
    second: Any
    waits: list[Any]
    count: int


def suspect(finding: Finding, region: Region, first: Any, second: Any) -> Suspect:
    """A suspect, with the waits of the second access as they are now."""
    waits = _task(second).waits
    count = getattr(second.who, "waited", waits.count)
    return Suspect(finding, region, first, second, waits.up_to(count), count)


def explain(machine: Any, suspects: list[Suspect]) -> None:
    """Adds to findings what the whole run tells about them, each explanation once."""
    told: set[Any] = set()
    for one in suspects:
        for key, text in _explanations(machine, one):
            if text and key not in told:
                told.add(key)
                one.finding.notes.append(text)


def _explanations(machine: Any, one: Suspect) -> Iterable[tuple[Any, str]]:
    first, second = one.first, one.second
    if first is None:
        writers = [w for w in machine.detector.last_writes(one.region) if w.device != second.device]
        if not writers:
            yield ("places", second.site), _unwritten_places(machine, one)
        for writer in writers[:1]:
            at = f"Device {writer.device} writes it later, at {writer.site}."
            yield ("later", writer.site, second.site), at
            yield _wrong_signal(machine, writer, one)
    elif "read" in first.what or "read" in second.what:
        yield _wrong_signal(machine, first, one)
    else:
        yield ("places", first.site, second.site), _two_writes(machine, one)


def _wrong_signal(machine: Any, before: Any, one: Suspect) -> tuple[Any, str]:
    """Where the signals of the access `before` went, if not to what the other one waited for."""
    peer, device = before.device, one.second.device
    if peer != device and (text := _never_awaited(machine, peer, device)):
        return ("never awaited", text), text
    found = []
    for wait in one.waits if peer != device else ():
        semaphore = wait.semaphore
        if semaphore.array.is_of_launch or semaphore.is_of_one_device:
            continue
        if peer in _signallers(semaphore):
            key = ("count", wait.site, before.site, one.second.site)
            return key, _too_few(wait, peer, device)
        went = _signals_of(machine, peer, semaphore)
        if went:
            # A signal to a device that it has sent nothing to is the likelier mistake.
            to = {item.device for item in went} - {device}
            is_idle = bool(to) and not any(peer in _writers(machine, d) for d in to)
            found.append((not is_idle, len(found), wait, went))
    if not found:
        return None, ""
    _, _, wait, went = min(found, key=lambda f: f[:2])
    late = {w.semaphore for w in _task(one.second).waits.after(one.count)}
    text = (
        f"Device {device} had waited for {wait.semaphore.name} at {wait.site}, which"
        f" {devices(_signallers(wait.semaphore))} signals. Device {peer} signals"
        f" {' and '.join(_name(item, late) for item in went)}, at"
        f" {'; '.join(dict.fromkeys(at for item in went for at in _sites_of(item, peer)))}."
        f" {_question(went, late, device, before.what)}"
    )
    return ("signal", wait.site, before.site, one.second.site), text


def _too_few(wait: Any, peer: int, device: int) -> str:
    """That a wait asks for less than all signals, of which those of `peer` may be the last."""
    semaphore = wait.semaphore
    if wait.needed > 0 and (len(_signallers(semaphore)) == 1 or wait.needed >= semaphore.total):
        return ""
    return (
        f"Device {device} had waited for {wait.needed} of the {semaphore.total} signals of"
        f" {semaphore.name}, at {wait.site}: they need not be those of device {peer}. Is the count"
        " too low?"
    )


def _never_awaited(machine: Any, peer: int, device: int) -> str:
    """Signals of `peer` to `device` for which nobody waits, in a run that reached its end."""
    if any(task.waiting is not None for task in machine.tasks):
        return ""
    for array in machine.devices[device].semaphores.values():
        for item in array.items if not array.is_of_launch else ():
            if peer in _signallers(item) and not item.uses:
                return (
                    f"Device {peer} signals {item.name} of device {device}, at"
                    f" {'; '.join(_sites_of(item, peer))}, and no wait asks for it. Is a wait"
                    " missing?"
                )
    return ""


def _question(went: list[Any], late: set[Any], device: int, what: str) -> str:
    """What may be wrong if a peer raises the semaphores `went`, some of which are waited for late.

    The access that they should announce is called `what`.
    """
    may_be = []
    if any(item.device != device for item in went):
        may_be.append("the peer of the signal")
    if any(item.device == device for item in went):
        may_be.append("its index" if may_be else "the index of the signal")
    if "write" in what:
        may_be.append(f"the peer of the {'copy' if 'copy' in what else 'store'}")
    order = "does the wait come too late, or " if any(item in late for item in went) else ""
    question = f"{order}is {' or '.join(may_be)} wrong?"
    return question[0].upper() + question[1:]


def _name(item: Any, late: set[Any]) -> str:
    """A semaphore in words, and whether it is waited for only later."""
    after = " (which waits for it only later)" if item in late else ""
    return f"{item.name} of device {item.device}{after}"


def _signals_of(machine: Any, peer: int, semaphore: Any) -> list[Any]:
    """What of an array `peer` signals: this index on any device, any index on its device."""
    arrays = (d.semaphores.get(semaphore.array.key) for d in machine.devices)
    return [
        item
        for array in arrays
        for item in (array.items if array is not None else ())
        if (item.index == semaphore.index or item.device == semaphore.device)
        and peer in _signallers(item)
    ]


def _unwritten_places(machine: Any, one: Suspect) -> str:
    """Who has written the same memory of other devices, if nobody has written this device's."""
    buffer = one.region.buffer
    empty = [d for d, ids in _same_place(machine, one.region) if (ids == UNWRITTEN).any()]
    everywhere = len(empty) == len(machine.devices)
    text = f"Nobody has written that place of {'any device' if everywhere else devices(empty)}."
    found = machine.detector.writers
    writers = {d.index: found.get((buffer.key, d.index), {}) for d in machine.devices}
    by = {d: {w for w, _ in who} for d, who in writers.items()}
    if not any(who - {d} for d, who in by.items()):
        return text
    # Of a device with several writers more may be learnt.
    shown = sorted((d for d in by if by[d]), key=lambda d: (-len(by[d]), d))[:_SHOWN]
    lines = [f"that of device {d} by {devices(by[d])}" for d in sorted(shown)]
    sites = {str(site): None for d in shown for _, site in writers[d]}
    return (
        f"{text} In all, {buffer.name} is written so: {', '.join(lines)}, at {'; '.join(sites)}. Is"
        " the peer or the place wrong?"
    )


def _two_writes(machine: Any, one: Suspect) -> str:
    """Which devices' place nobody has written, where one device's has been written twice."""
    places = _same_place(machine, one.region)
    empty = [d for d, ids in places if (ids == UNWRITTEN).any()]
    if empty and len(empty) < len(places):
        return (
            f"Nobody has written that place of {devices(empty)}: is the peer, or the place, of one"
            " of the two wrong?"
        )
    if one.first.device == one.second.device:
        return ""
    return (
        "Unless the later of the two is meant to win, one of them goes to a wrong device or to a"
        " wrong place."
    )


def _same_place(machine: Any, region: Region) -> list[tuple[int, Any]]:
    """For each device, the ids of the last writes of its part of memory like `region`."""
    buffers = ((d.index, d.buffers[region.buffer.key]) for d in machine.devices)
    return [(i, Region(b, region.steps, region.index).write_ids()) for i, b in buffers]


def _writers(machine: Any, device: int) -> set[int]:
    """The devices that have written to memory of `device`."""
    found = machine.detector.writers.items()
    return {w for (_, owner), who in found if owner == device for w, _ in who}


def _task(access: Any) -> Any:
    """The task that did an access, or issued the copy that did it."""
    return getattr(access.who, "issuer", access.who)


def _sites_of(semaphore: Any, peer: int) -> list[str]:
    return [str(site) for device, _, site in semaphore.signalled_by if device == peer]


def _signallers(semaphore: Any) -> set[int]:
    return {device for device, *_ in semaphore.signalled_by}
