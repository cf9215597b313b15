"""One process of a job as the supervisor sees it, from its agent's messages."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.supervision.causes import (
    Failure,
    Rank,
    ended_by_launcher,
    exited,
    killed,
    signal_name,
)
from stretto.launch.supervision.programs import Program
from stretto.launch.supervision.report import (
    Whereabouts,
    innermost_frame,
    may_be_joining,
    may_wait_for_others,
    place_in_script,
)
from stretto.launch.supervision.stillness import Look, Stillness
from stretto.launch.supervision.wire import Channel, Message

_BUSY_HOST_FACTOR = 4
_LONGEST_STEP_S = 1.0


class Member:
    """An agent's connection and the state of its process.

    Args:
      channel: the connection, from an agent that has shown the job's token.
      hello: the agent's first message.
      spins: whether a process may compute while it waits for others, as on GPUs.
      stderr_tail: gives the last lines that a process wrote to stderr.

    Raises:
      ValueError: the message is not an agent's first.
    """

    def __init__(
        self,
        channel: Channel,
        hello: Message,
        *,
        spins: bool = False,
        stderr_tail: Callable[[int], Sequence[str]] = lambda _: (),
    ):
        if not is_hello(hello):
            raise ValueError("not the first message of an agent")
        self.channel = channel
        self.process_id: int = hello["index"]
        self.count: int | None = hello["count"]
        self.host: str = hello["host"]
        self.agent_pid: int = hello["pid"]
        self.versions: dict[str, str] = hello["versions"]
        self.prepared: Message | None = None
        self.reaches_coordinator: bool | None = None
        self.over = False
        self.connected = True
        self.lost_host = False  # its connection is silent, though its end was not reported
        self.stayed_alone = False  # has used JAX, and has not joined the others
        self.joins = False  # joins the others, or has joined them
        self.vanished = False  # ended with status 0 before the end of its script: os._exit(0)
        self.progress = ""
        self.programs: list[Program] = []
        self.heard_at = time.monotonic()  # of output, of a program, of new progress
        self.finished_at: float | None = None  # when its script came to its end, with status 0
        self.output_taken = 0  # cost of its output that it has been told was dealt with
        self.stillness = Stillness(spins=spins)
        self.silence = Silence()
        self._stderr_tail = stderr_tail
        self._failed = False
        self._stopping = False
        self._lost = False
        self._stopped: tuple[float, int] | None = None  # since when, by which signal
        self._stacks: list[str] = []
        self._asked_for_stacks = False

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; a broken connection shows when it is next read."""
        if kind == "stop":
            self._stopping = True
        if self.connected:
            with contextlib.suppress(OSError):
                self.channel.send(kind, **fields)

    def hear(self) -> None:
        """It has written something."""
        self.heard_at = time.monotonic()
        self.silence.hear(self.heard_at)

    def update(self, message: Message) -> Failure | None:
        """Record a message of the agent; return the failure, if it reports the first one.

        Raises:
          LaunchError: the agent could not start the process.
        """
        now = time.monotonic()
        self.silence.hear(now)
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
            case "looked":
                seen = message["seen"]
                self.stillness.add(Look(**seen) if seen else None, now)
            case "finished":
                self.finished_at = now
            case "stopped":
                self._stopped = (now, message["signal"])
            case "continued":
                self._stopped = None
            case "joins":
                self.joins = True
            case "alone":
                self.stayed_alone = True
            case "failure" if not self._stopping:
                self._failed = True
                record = message["record"]
                return exited(self.process_id, record["status"], now, record["traceback"])
            case "ended":
                self.over = True
                if message["state"] == "exited" and message["number"] == 0:
                    self.vanished = self.finished_at is None
                    self.finished_at = self.finished_at or now - message["age_s"]
                moment = now - message["age_s"]
                if message.get("by_launcher") and not (self._stopping or self._failed):
                    return ended_by_launcher(self.process_id, message["by_launcher"], moment)
                return self._end(message["state"], message["number"], moment)
        return None

    def _end(self, state: str, number: int, moment: float) -> Failure | None:
        if self._stopping or self._failed:
            return None
        if state == "killed":
            return killed(self.process_id, number, moment, self._stderr_tail(self.process_id))
        return exited(self.process_id, number, moment) if number else None

    def lose(self, error: Exception) -> Failure | None:
        """The connection is gone; a failure unless the process had ended or was asked to end."""
        was_over, self.over, self._lost = self.over, True, True
        self.connected = False
        if was_over or self._stopping:
            return None
        now = time.monotonic()
        if isinstance(error, EOFError):
            how = f"its agent on host {self.host} was killed, or its launcher ended it"
            return Failure(self.process_id, how, 1, now, rank=Rank.CUT_OFF, by_launcher=True)
        self.lost_host = True
        how = f"lost host {self.host}: {error.args[-1] if error.args else error}"
        return Failure(self.process_id, how, 1, now)

    def is_needed_by(self, other: "Member") -> bool:
        """Whether it has reported a program that both run together."""
        return any(other.process_id in program.processes for program in self.programs)

    def stopped_too_long(self, limit_s: float) -> Failure | None:
        """A failure if a signal such as SIGSTOP has held the process for ``limit_s``."""
        if self._stopped is None:
            return None
        since, number = self._stopped
        if time.monotonic() - since < limit_s:
            return None
        self._stopped = None
        how = f"stopped by {signal_name(number)} and not continued within {limit_s:g} s"
        return Failure(self.process_id, how, 128 + number, since, signal=number)

    def forget_stacks(self) -> None:
        """What it told is old, and it may be asked again."""
        self._stacks.clear()
        self._asked_for_stacks = False

    def ask_for_stacks_once(self) -> None:
        """Ask where its threads are, unless that was done since ``forget_stacks``."""
        if not self._asked_for_stacks:
            self._asked_for_stacks = True
            self.send("stacks")

    def may_be_in_a_collective(self) -> bool:
        """Whether its main thread, by the stacks it told, may wait for other processes."""
        frame = innermost_frame(self._stacks)
        return frame is not None and may_wait_for_others(frame)

    def may_be_joining(self) -> bool:
        """Whether its main thread, by the stacks it told, may wait for all others to join."""
        frame = innermost_frame(self._stacks)
        return frame is not None and may_be_joining(frame)

    def silent_agent(self, limit_s: float) -> Failure | None:
        """A failure if its agent has not answered for ``limit_s``, or is stopped that long."""
        now = time.monotonic()
        silent_s = self.silence.lasts(now)
        if self.over or silent_s < limit_s:
            return None
        if self.is_here and not _is_stopped(self.agent_pid):
            if silent_s < _BUSY_HOST_FACTOR * limit_s:
                return None  # the machine is overloaded: a running process answers at last
            how = f"its agent on host {self.host} has not answered for {silent_s:.0f} s"
            return Failure(self.process_id, how, 1, now)
        how = f"its agent on host {self.host} was stopped, or hangs, for {silent_s:.0f} s"
        number = signal.SIGSTOP
        return Failure(self.process_id, how, 128 + number, now - silent_s, signal=number)

    @property
    def is_here(self) -> bool:
        """Whether its agent runs on this machine."""
        return self.host == socket.gethostname()

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
        if self.is_here:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.agent_pid, signal.SIGKILL)


class Silence:
    """How long the supervisor has waited for an agent's answer.

    Only the time in which the supervisor itself ran counts: an agent that was stopped together with
    it, or whose answer waits in its buffers, is not silent.
    """

    def __init__(self):
        self._asked_at: float | None = None
        self._counted_at = 0.0
        self._seconds = 0.0

    def ask(self, now: float) -> bool:
        """Record that an answer is wanted. Whether to ask: False while an answer is awaited."""
        if self._asked_at is not None:
            return False
        self._asked_at = self._counted_at = now
        self._seconds = 0.0
        return True

    def hear(self, now: float) -> None:
        """Something arrived."""
        if self._asked_at is not None and now > self._asked_at:
            self._asked_at = None
            self._seconds = 0.0

    def lasts(self, now: float) -> float:
        """Seconds of silence so far; to be called often: a long pause in between counts little."""
        if self._asked_at is None:
            return 0.0
        self._seconds += min(now - self._counted_at, _LONGEST_STEP_S)
        self._counted_at = now
        return self._seconds


def is_hello(message: Message) -> bool:
    """Whether a message has what an agent's first one has."""
    wanted = {"index": int, "host": str, "pid": int, "versions": dict, "token": str}
    count = message.get("count")
    return (
        message["kind"] == "hello"
        and all(type(message.get(name)) is kind for name, kind in wanted.items())
        and (count is None or type(count) is int)
    )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
