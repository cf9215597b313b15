"""One process of a job as the supervisor knows it, by what its agent has told."""

import contextlib
import os
import signal
import socket
import time
from dataclasses import replace

from stretto.launch.errors import LaunchError
from stretto.launch.supervision.programs import Program
from stretto.launch.supervision.report import (
    Failure,
    Whereabouts,
    exited,
    killed,
    place_in_script,
    signal_name,
)
from stretto.launch.supervision.wire import Channel, Message


class Member:
    """An agent's connection and the state of its process.

    Args:
      channel: the connection, from an agent that has shown the job's token.
      hello: the agent's first message.
    """

    def __init__(self, channel: Channel, hello: Message):
        self.channel = channel
        self.process_id: int = hello["index"]
        self.count: int | None = hello["count"]
        self.host: str = hello["host"]
        self.agent_pid: int = hello["pid"]
        self.versions: dict[str, str] = hello["versions"]
        self.prepared: Message | None = None
        self.reaches_coordinator: bool | None = None
        self.over = False
        self.progress = ""
        self.programs: list[Program] = []
        self.heard_at = time.monotonic()  # of output, of a program, of new progress
        self._failed = False
        self._stopping = False
        self._lost = False
        self._stopped: tuple[float, int] | None = None  # since when, by which signal
        self._stacks: list[str] = []

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; a broken connection shows when it is next read."""
        if kind == "stop":
            self._stopping = True
        with contextlib.suppress(OSError):
            self.channel.send(kind, **fields)

    def update(self, message: Message) -> Failure | None:
        """Take in a message of the agent's; the failure, if it tells of a first one.

        Raises:
          LaunchError: the agent could not start the process.
        """
        now = time.monotonic()
        if message.get("progress", self.progress) != self.progress:
            self.progress, self.heard_at = message["progress"], now
        match message["kind"]:
            case "prepared":
                self.prepared = message
            case "probed":
                self.reaches_coordinator = message["ok"]
            case "refused":
                raise LaunchError(f"{message['problem']} (host {self.host})")
            case "stacks":
                self._stacks.append(message["text"])
            case "program":
                self.programs.append(Program.from_record(message["record"]["program"]))
                self.heard_at = now
            case "stopped":
                self._stopped = (now, message["signal"])
            case "continued":
                self._stopped = None
            case "failure" if not self._stopping:
                self._failed = True
                record = message["record"]
                failure = exited(self.process_id, record["status"], now)
                return replace(failure, traceback=record["traceback"])
            case "ended":
                self.over = True
                return self._end(message["state"], message["number"], now - message["age_s"])
        return None

    def _end(self, state: str, number: int, moment: float) -> Failure | None:
        if self._stopping or self._failed:
            return None
        if state == "killed":
            return killed(self.process_id, number, moment)
        return exited(self.process_id, number, moment) if number else None

    def lose(self, error: Exception) -> Failure | None:
        """The connection is gone; a failure unless the process was over or told to end."""
        was_over, self.over, self._lost = self.over, True, True
        if was_over or self._stopping:
            return None
        if isinstance(error, EOFError):
            how = f"its agent on host {self.host} was killed, or its launcher ended it"
        else:
            how = f"lost host {self.host}: {error.args[-1] if error.args else error}"
        return Failure(self.process_id, how, 1, time.monotonic())

    def stopped_too_long(self, limit_s: float) -> Failure | None:
        """A failure if a signal such as SIGSTOP has held the process for ``limit_s``."""
        if self._stopped is None:
            return None
        since, number = self._stopped
        if time.monotonic() - since < limit_s:
            return None
        self._stopped = None
        how = f"stopped by {signal_name(number)} and not continued within {limit_s:g} s"
        return Failure(self.process_id, how, 128 + number, since)

    @property
    def state(self) -> str:
        """In a word, for a process whose place in the script is not known."""
        if self.over:
            return "lost" if self._lost else "ended"
        if self._stopped is not None:
            return f"stopped by {signal_name(self._stopped[1])}"
        return "outside the script" if self._stacks else "gave no stack"

    def whereabouts(self, script: str) -> Whereabouts:
        """Where it was when last asked for its stacks."""
        place = place_in_script(self._stacks, script)
        return Whereabouts(self.process_id, place, self.state, self.progress)

    def kill_agent_if_here(self) -> None:
        """SIGKILL for an agent on this machine that does not answer; its worker dies with it."""
        if self.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.agent_pid, signal.SIGKILL)
