"""The agents of one attempt: their launchers, their connections, and their messages.

One thread, one selector, and nothing in it that waits for a reader, a disk or a peer. ``wait``
handles what arrives; whoever follows the job looks at ``members`` and ``failures`` in between.
``stop`` ends all processes, leaving the session leaves nothing behind, whatever happened before.
"""

import base64
import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from types import FrameType

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.planning.job import Job
from stretto.launch.supervision import stdin
from stretto.launch.supervision.causes import Failure
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.descriptors import make_room
from stretto.launch.supervision.door import Door
from stretto.launch.supervision.launching import Launchers
from stretto.launch.supervision.member import Member
from stretto.launch.supervision.outlet import STREAMS
from stretto.launch.supervision.wire import Channel, Message

_SHORT_GRACE_S = 1.5  # from SIGTERM to SIGKILL, where a process has failed or the time is over
_END_LIMIT_S = 2.0
_SELECT_S = 0.25
_PING_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The supervisor got a signal that asks it to end the job."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number
        self.status = 128 + number


class Session:
    """Agents of a job, from their start to their end; a context manager.

    Attributes:
      members: the agents that have connected and shown the job's token.
      failures: what went wrong in processes, in the order it was heard of.
      heard: the agents that something came from in the last `wait`.
      launchers: what starts the agents.
    """

    def __init__(self, job: Job, console: Console):
        self.job = job
        self.members: list[Member] = []
        self.failures: list[Failure] = []
        self.heard: list[Member] = []
        self._by_id: dict[int, Member] = {}
        self._console = console
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            self._selector, self._token, self._admit, console.say, len(job.layout.processes)
        )
        self.launchers = Launchers(self._selector, len(job.layout.processes))
        self._interrupts: list[int] = []
        self._pinged_at = 0.0

    def __enter__(self) -> "Session":
        # What this process was told to ignore, as by nohup, it goes on ignoring.
        self._handlers = {
            number: signal.signal(number, self._on_interrupt)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_taken)
        self._console.on_taken(self._on_output_taken)
        return self

    def __exit__(self, *_: object) -> None:
        self._console.on_taken(lambda: None)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
        self.launchers.end()
        self._wake.close()
        self._selector.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        """Open the port that agents connect to, and run the commands that start them.

        Raises:
          LaunchError: this host has no address that others could reach, or the port is taken, or
            too few files may be open.
        """
        job = self.job
        make_room(len(job.layout.processes))
        addresses = [network.LOOPBACK]
        if not job.is_local:
            addresses = network.interface_addresses(job.interface)
            if not addresses:
                where = f" on interface {job.interface}" if job.interface else ""
                raise LaunchError(f"this host has no network address{where}; see ip address")
        port = self._door.open(addresses, job.control_port)
        rendezvous = environment.Rendezvous(self._token, tuple(addresses), port)
        # First, not last: MPICH 5.0.2 forgets to forward the environment's last variable.
        environ = {environment.RENDEZVOUS: str(rendezvous), **environment.current()}
        self.launchers.start(job.commands, environ, job.folder)

    def wait(self) -> None:
        """Handle what arrives within a quarter of a second.

        Raises:
          Interrupted: a signal asked for the end of the job.
          LaunchError: an agent could not start its process.
          BrokenPipeError: nobody will read the job's output any more.
        """
        self.heard = []
        for key, _ in self._selector.select(_SELECT_S):
            key.data(key.fileobj)
        self._on_time()
        self._console.check()
        if self._interrupts:
            raise Interrupted(self._interrupts[0])

    def running(self) -> set[int]:
        """The processes that have not ended."""
        return {member.process_id for member in self.members if not member.over}

    def have_ended(self) -> set[int]:
        """Those that have, of the processes that something came from in the last `wait`.

        All who wait for many look at these only: each message makes one `wait` return.
        """
        return {member.process_id for member in self.heard if member.over}

    def feed_stdin(self) -> None:
        """Let process 0 read what is written to this process, from here on, if the job says so."""
        if self.job.takes_stdin:
            self._selector.register(stdin.source(), selectors.EVENT_READ, self._on_stdin)

    def send_all(self, kind: str) -> None:
        """Send a message without more to all agents whose process has not ended."""
        for member in self.members:
            if not member.over:
                member.send(kind)

    def drain(self, limit_s: float | None) -> bool:
        """Let the job's output be read, however long that takes; whether it was, in time.

        Raises:
          Interrupted: a signal asked for the end.
          BrokenPipeError: nobody will read it.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        while not self._console.drain(_SELECT_S):
            self.wait()
            if until is not None and time.monotonic() > until:
                return False
        self._console.check()
        return True

    def stop(self, number: int = signal.SIGTERM, grace_s: float = _SHORT_GRACE_S) -> None:
        """End all processes, through their agents, and let the agents go.

        Args:
          number: the signal that asks them to end.
          grace_s: after which they get SIGKILL; sooner if another signal arrives here.
        """
        num_interrupts = len(self._interrupts)
        self._send_stop(number, grace_s)
        until = time.monotonic() + grace_s + _END_LIMIT_S
        running = self.running()
        while running and time.monotonic() < until:
            with contextlib.suppress(Interrupted, BrokenPipeError, LaunchError):
                self.wait()
            running -= self.have_ended()
            if len(self._interrupts) > num_interrupts:
                num_interrupts = len(self._interrupts)
                self._send_stop(signal.SIGKILL, 0)
                until = min(until, time.monotonic() + _END_LIMIT_S)
        for member in self.members:
            if not member.over:
                member.kill_agent_if_here()
            member.send("done")

    def _send_stop(self, number: int, grace_s: float) -> None:
        for member in self.members:
            if not member.over:
                member.send("stop", signal=int(number), grace_s=grace_s)

    # Events

    def _on_interrupt(self, number: int, _: FrameType | None) -> None:
        self._interrupts.append(number)

    def _on_stdin(self, source: int) -> None:
        """Send one piece; the next is read when the agent says that this one is taken."""
        data = stdin.read_piece(source)
        self._selector.unregister(source)
        self.members[0].send("stdin", data=data.decode("latin-1"))

    def _admit(self, channel: Channel, hello: Message) -> None:
        member = Member(
            channel,
            hello,
            spins=self.job.layout.platform == "gpu",
            stderr_tail=self._console.stderr_tail,
        )
        self.members.append(member)
        self._by_id[member.process_id] = member
        self._selector.register(channel, selectors.EVENT_READ, lambda _: self._on_member(member))
        channel.on_kept = lambda: self._listen(member, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _listen(self, member: Member, events: int) -> None:
        """Hear of what a member sends, and of the moment at which it takes more."""
        if member.connected:
            key = self._selector.get_key(member.channel)
            if key.events != events:
                self._selector.modify(member.channel, events, key.data)

    def _on_member(self, member: Member) -> None:
        self.heard.append(member)
        try:
            member.channel.flush()
            if not member.channel.has_unsent:
                self._listen(member, selectors.EVENT_READ)
            messages = member.channel.receive()
            for message in messages:
                self._take(member, message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            self._selector.unregister(member.channel)
            member.channel.close()
            if failure := member.lose(error):
                self.failures.append(failure)

    def _take(self, member: Member, message: Message) -> None:
        if message["kind"] == "output":
            data = base64.b64decode(message["data"])
            if message["stream"] not in STREAMS:
                raise ValueError(f"there is no stream {message['stream']}")
            member.hear()
            self._console.output(member.process_id, message["stream"], data)
            return
        if message["kind"] == "stdin":
            self.feed_stdin()
            return
        if failure := member.update(message):
            self.failures.append(failure)
        if message["kind"] == "ended":
            self._console.end(member.process_id)

    def _on_output_taken(self) -> None:
        """In a thread of the console's: have `wait` return."""
        with contextlib.suppress(OSError):
            os.write(self._wake.fileno(), b"x")

    def _on_taken(self, woken: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            woken.recv(1 << 12)
        for process_id in self._console.newly_taken():
            member = self._by_id[process_id]
            taken = self._console.taken(process_id)
            if taken > member.output_taken:
                member.output_taken = taken
                member.send("taken", cost=taken)

    def _on_time(self) -> None:
        self._door.on_time()
        now = time.monotonic()
        if now < self._pinged_at + _PING_S:
            return
        self._pinged_at = now
        for member in self.members:
            if not member.over and member.silence.ask(now):
                member.send("ping")
