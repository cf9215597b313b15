"""Processes that have reached the end of their script while others wait for them for ever.

A process may end before the others. It must not, if they still run something together with it: then
they wait until JAX's own limit, which takes minutes. They are idle until then.
"""

import time
from collections.abc import Sequence

from stretto.launch.supervision.causes import Failure
from stretto.launch.supervision.member import Member

_STILL_LIMIT_S = 5.0
_ASK_FOR_STACKS_AFTER_S = 3.0
_LOOK_EVERY_S = 1.0


class Departures:
    """Watches for processes that wait for one that has finished."""

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self._looked_at = 0.0

    def wants_news(self) -> bool:
        """Whether it is time to look at the processes."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S or not self._pairs():
            return False
        self._looked_at = now
        return True

    def stuck(self) -> Failure | None:
        """The failure of a process that finished while one that runs with it waits.

        Asks those that stand still for their stacks, to tell waits for other processes from those
        for a thread, such as one that writes a checkpoint.
        """
        now = time.monotonic()
        for gone, left in self._pairs():
            if left.stillness.since is None:
                left.forget_stacks()
                continue
            since = max(left.stillness.since, left.heard_at, gone.finished_at or 0.0)
            if now >= since + _ASK_FOR_STACKS_AFTER_S:
                left.ask_for_stacks_once()
            if now >= since + _STILL_LIMIT_S and left.may_be_in_a_collective():
                how = (
                    f"its script ended with status 0, though process {left.process_id} waits for "
                    "it in a program that both run"
                )
                return Failure(gone.process_id, how, 1, gone.finished_at or now)
        return None

    def _pairs(self) -> list[tuple[Member, Member]]:
        """Each process that goes on, after the first to finish that it has run programs with."""
        needed: dict[int, Member] = {}  # by process, the first that it may wait for
        gone = [m for m in self._members if m.finished_at is not None and m.programs]
        groups: set[tuple[int, ...]] = set()
        for member in sorted(gone, key=lambda member: member.finished_at or 0.0):
            for group in {program.processes for program in member.programs} - groups:
                groups.add(group)
                for process_id in group:
                    needed.setdefault(process_id, member)
        left = [m for m in self._members if m.finished_at is None and not m.over]
        return [(needed[m.process_id], m) for m in left if m.process_id in needed]
