"""The heap's words in the simulator: counts, and messages, flagged and bare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.distributed.simulator.state.clocks import Clock
from stretto.distributed.simulator.state.races import Access


@dataclass
class Message:
    """One message in a device's memory.

    Attributes:
      words: where it lies: first, and one past the last.
      flag, value: what it carries.
      clock: what its sender knew.
      written: the access that sent it.
      reads: those that received it, in this launch.
      launch: the number of the launch that sent it.
      bare: whoever receives it zeroes it.
      zeroed: that is done, and a fence makes sure of it; always true of one with flags.
    """

    words: tuple[int, int]
    flag: int
    value: np.ndarray
    clock: Clock
    written: Access
    launch: int
    bare: bool = False
    zeroed: bool = True
    reads: list[Access] = field(default_factory=list)


class Slot:
    """A device's slot of the heap, which outlives launches.

    Attributes:
      counts: int32 values, by word.
      messages: by first word.
      waiters: tasks that wait for a message.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.messages: dict[int, Message] = {}
        self.waiters: list[Any] = []

    def overlapping(self, first: int, end: int) -> list[Message]:
        """The messages that share words with these."""
        return [m for m in self.messages.values() if m.words[0] < end and first < m.words[1]]

    def put(self, message: Message) -> None:
        """Stores a message in place of those that it overlaps."""
        for old in self.overlapping(*message.words):
            del self.messages[old.words[0]]
        self.messages[message.words[0]] = message


class Mail:
    """The slots of all devices under one `simulate`.

    `unfenced` are the bare messages that each task has received since its last fence.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self.launches = 0
        self.unfenced: dict[Any, list[Message]] = {}

    def slot(self, number: int) -> Slot:
        """The slot of a device; made, zeroed, at its first use."""
        return self._slots.setdefault(number, Slot())
