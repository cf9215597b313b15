"""Whether all processes of a job run the same programs, from their messages as they compile them.

A program that several processes run must be the same on all: with other shapes, or another program
in its place, they wait for each other for ever, or compute nonsense. Each process reports the
programs that it compiles for itself and others; the supervisor compares them.
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.launch.supervision.causes import Failure
from stretto.launch.supervision.stillness import Stillness

SILENCE_LIMIT_S = 5.0
_LOOK_EVERY_S = 1.0
_COMPARE_EVERY_S = 0.5


@dataclass(frozen=True)
class Program:
    """A program that several processes run; ``digest`` distinguishes different ones."""

    text: str
    digest: str
    processes: tuple[int, ...]

    @classmethod
    def from_record(cls, record: Mapping) -> "Program":
        """From what a process writes for its agent."""
        return cls(record["text"], record["digest"], tuple(record["processes"]))


# The programs of a process, each once, in the order in which it first compiled them.
type Told = dict[str, Program]


@dataclass(frozen=True)
class Mismatch:
    """Two processes of which each has compiled a program that the other has not.

    ``process_id`` is the one that differs from most others.
    """

    process_id: int
    other_id: int
    program: Program
    other: Program

    @property
    def summary(self) -> str:
        """In a phrase, what the process did."""
        together = _named(self.program.processes)
        return (
            f"compiled another program than process {self.other_id}, of those that {together} run "
            "together"
        )

    @property
    def details(self) -> str:
        """Both programs, a line each."""
        both = sorted([(self.process_id, self.program), (self.other_id, self.other)])
        lines = [f"  process {process_id}: {program.text}" for process_id, program in both]
        if self.program.text == self.other.text:
            lines.append("  They differ in the collectives or kernels inside.")
        return "\n".join(lines)


class Teller(Protocol):
    """A process as the supervisor hears of it; ``heard_at`` is when it last did."""

    programs: list[Program]
    heard_at: float
    stillness: Stillness


class Comparison:
    """Looks out for processes that compiled different programs and have stood still since.

    A process may compile what the others do not if it does not run it, or all may compile the same
    in another order. Then it goes on, and is heard of, or seen to compute.
    """

    def __init__(self, members: Sequence[Teller]):
        self._members = members
        self._told = 0
        self._compared_at = 0.0
        self._mismatch: Mismatch | None = None
        self._asked_at = 0.0

    def wants_news(self) -> bool:
        """Whether it is time to look at the processes."""
        self._compare()
        now = time.monotonic()
        if self._mismatch is None or now < self._asked_at + _LOOK_EVERY_S:
            return False
        self._asked_at = now
        return True

    def stuck(self) -> Failure | None:
        """The failure of a process that went another way, and of which nothing is heard."""
        self._compare()
        found, now = self._mismatch, time.monotonic()
        if found is None:
            return None
        pair = [self._members[i] for i in (found.process_id, found.other_id)]
        still_since = [member.stillness.since for member in pair]
        if None in still_since:
            return None
        since = max([member.heard_at for member in pair] + [s for s in still_since if s])
        if now < since + SILENCE_LIMIT_S:
            return None
        return Failure(found.process_id, found.summary, 1, now, traceback=found.details)

    def _compare(self) -> None:
        told = sum(len(member.programs) for member in self._members)
        now = time.monotonic()
        if told == self._told or now < self._compared_at + _COMPARE_EVERY_S:
            return
        self._told, self._compared_at = told, now
        self._mismatch = find_mismatch([member.programs for member in self._members])


def find_mismatch(programs: Sequence[Sequence[Program]]) -> Mismatch | None:
    """Processes that went different ways; None where none did, as far as is known.

    Args:
      programs: for each process, those that it has compiled together with others.
    """
    for told in _by_group(programs):
        # Most processes told the same, so few pairs are looked at.
        kinds: dict[frozenset[str], list[int]] = {}
        for process_id, own in told.items():
            kinds.setdefault(frozenset(own), []).append(process_id)
        disagreeing: Counter[int] = Counter()
        for one, other in itertools.combinations(kinds, 2):
            if one - other and other - one:
                disagreeing.update(dict.fromkeys(kinds[one], len(kinds[other])))
                disagreeing.update(dict.fromkeys(kinds[other], len(kinds[one])))
        if disagreeing:
            odd = max(disagreeing, key=lambda i: (disagreeing[i], i))
            return _mismatch(odd, told)
    return None


def _mismatch(odd: int, told: Mapping[int, Told]) -> Mismatch:
    """Between process `odd` and the first that it disagrees with."""
    for process_id, own in sorted(told.items()):
        alone = [program for digest, program in told[odd].items() if digest not in own]
        missed = [program for digest, program in own.items() if digest not in told[odd]]
        if alone and missed:
            return Mismatch(odd, process_id, alone[0], missed[0])
    raise ValueError(f"process {odd} disagrees with none of {list(told)}")


def hints(programs: Sequence[Sequence[Program]]) -> str:
    """What the programs say of a job that hangs or crashed, in lines; empty if nothing.

    A mismatch; or the last program that only some of its processes have compiled, while the others
    may run one of the programs before in its place.
    """
    if found := find_mismatch(programs):
        return f"Before that, process {found.process_id} {found.summary}:\n{found.details}"
    for told in _by_group(programs):
        most = max(map(len, told.values()))
        ahead = [process_id for process_id, own in told.items() if len(own) == most]
        behind = [process_id for process_id, own in told.items() if len(own) < most]
        if behind:
            last = list(told[ahead[0]].values())[-1]
            return (
                f"Of the programs that {_named(last.processes)} run together, {_named(ahead)} "
                f"compiled one that {_named(behind)} did not:\n  {last.text}"
            )
    return ""


def _by_group(programs: Sequence[Sequence[Program]]) -> Iterator[dict[int, Told]]:
    """For each set of processes that run programs together, what each of them told of those."""
    for group in sorted({program.processes for told in programs for program in told}):
        members = [process_id for process_id in group if process_id < len(programs)]
        told: dict[int, Told] = {process_id: {} for process_id in members}
        for process_id in members:
            for program in programs[process_id]:
                if program.processes == group:
                    told[process_id].setdefault(program.digest, program)
        yield told


def _named(process_ids: Sequence[int]) -> str:
    """``process 1`` or ``processes 0, 2``."""
    many = "processes" if len(process_ids) > 1 else "process"
    return f"{many} {', '.join(map(str, process_ids))}"
