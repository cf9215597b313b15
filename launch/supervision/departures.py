"""Processes that have reached the end of their script while others wait for them for ever.

A process may end before the others. It must not, if they still run something together with it, or
have yet to join it, or come to an end that all reach together: then they wait until JAX's own
limit, which takes minutes. They are idle until then.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stretto.launch.supervision.causes import Failure
from stretto.launch.supervision.member import Member

_STILL_LIMIT_S = 5.0
_ASK_FOR_STACKS_AFTER_S = 3.0
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class _Wait:
    """A process that may wait for one that has finished: where, and whether its stacks say so."""

    gone: Member
    left: Member
    where: str
    is_there: Callable[[Member], bool] | None = None


class Departures:
    """Watches for processes that wait for one that has finished."""

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self._looked_at = 0.0

    def wants_news(self) -> bool:
        """Whether it is time to look at the processes."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S or not any(True for _ in self._waits()):
            return False
        self._looked_at = now
        return True

    def stuck(self) -> Failure | None:
        """The failure of a process that finished while another waits for it.

        Asks those that stand still for their stacks, to tell waits for other processes from those
        for a thread, such as one that writes a checkpoint.
        """
        now = time.monotonic()
        for wait in self._waits():
            gone, left = wait.gone, wait.left
            if left.stillness.since is None:
                left.forget_stacks()
                continue
            ends = (gone.finished_at or 0.0, left.finished_at or 0.0)
            since = max(left.stillness.since, left.heard_at, *ends)
            if wait.is_there is not None and now >= since + _ASK_FOR_STACKS_AFTER_S:
                left.ask_for_stacks_once()
            is_there = wait.is_there is None or wait.is_there(left)
            if now >= since + _STILL_LIMIT_S and is_there:
                how = (
                    f"its script ended with status 0, though process {left.process_id} waits for "
                    f"it {wait.where}"
                )
                return Failure(gone.process_id, how, 1, gone.finished_at or now)
        return None

    def _waits(self) -> Iterator[_Wait]:
        for gone, left in self._pairs():
            yield _Wait(gone, left, "in a program that both run", Member.may_be_in_a_collective)
        first = min(
            (m for m in self._members if m.finished_at is not None),
            key=lambda member: (member.joins, member.finished_at),
            default=None,
        )
        if first is None:
            return
        vanished = next((m for m in self._members if m.joins and m.vanished), None)
        for left in self._members:
            if left.over or left is first or not left.joins:
                continue  # what has not told that it joins is not looked at: that costs messages
            if left.finished_at is None and not left.programs:
                yield _Wait(first, left, "where all processes join", Member.may_be_joining)
            # Those that have joined wait for one another at their ends, in JAX.
            elif vanished and left.finished_at is not None:
                yield _Wait(vanished, left, "at its end, which all processes reach together")

    def _pairs(self) -> list[tuple[Member, Member]]:
        """Each process that goes on, after the first to finish that it may wait for.

        That is one that has run programs with it; or that has run none, though a program of the
        one that goes on needs it.
        """
        needed: dict[int, Member] = {}  # by process, the first that it may wait for
        gone = [m for m in self._members if m.finished_at is not None and m.programs]
        groups: set[tuple[int, ...]] = set()
        for member in sorted(gone, key=lambda member: member.finished_at or 0.0):
            for group in {program.processes for program in member.programs} - groups:
                groups.add(group)
                for process_id in group:
                    needed.setdefault(process_id, member)
        left = [m for m in self._members if m.finished_at is None and not m.over]
        missing = self._missing(left)
        pairs = []
        for m in left:
            found = [missing[p.processes] for p in m.programs if p.processes in missing]
            if first := needed.get(m.process_id, next(iter(found), None)):
                pairs.append((first, m))
        return pairs

    def _missing(self, left: Sequence[Member]) -> dict[tuple[int, ...], Member]:
        """One that has finished and run nothing, by the processes of a program that needs it."""
        gone = {m.process_id: m for m in self._members if m.finished_at is not None}
        strangers = {i: m for i, m in gone.items() if not m.programs}
        if not strangers:
            return {}
        groups = {program.processes for member in left for program in member.programs}
        found = {group: [strangers[i] for i in group if i in strangers] for group in groups}
        return {group: members[0] for group, members in found.items() if members}
