"""The agents of one attempt: their launchers, their connections, and what they tell.

One thread, one selector. ``wait`` handles what arrives; whoever follows the job looks at
``members`` and ``failures`` in between. ``stop`` ends all processes, ``close`` leaves nothing
behind, whatever happened before.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from types import FrameType

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.planning.job import Job
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.member import Member
from stretto.launch.supervision.report import Failure
from stretto.launch.supervision.wire import Channel

_STOP_GRACE_S = 1.5  # from SIGTERM to SIGKILL
_STOP_LIMIT_S = 3.5
_LAUNCHER_EXIT_S = 1.5
_SELECT_S = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The supervisor got a signal that asks it to end the job."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number


class Session:
    """Agents of a job, from their start to their end; a context manager.

    Attributes:
      members: the agents that have connected and shown the job's token.
      failures: what went wrong in processes, in the order it was heard of.
      launcher_output: lines that mpirun or srun wrote itself.
    """

    def __init__(self, job: Job, console: Console):
        self.job = job
        self.members: list[Member] = []
        self.failures: list[Failure] = []
        self.launcher_output: list[str] = []
        self._console = console
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._interrupt: int | None = None

    def __enter__(self) -> "Session":
        self._handlers = {number: signal.signal(number, self._on_interrupt) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        """Open the socket that agents connect to, and run the commands that start them.

        Raises:
          LaunchError: this host has no address that others could reach.
        """
        listener = network.listen(network.LOOPBACK if self.job.is_local else "0.0.0.0")
        self._selector.register(listener, selectors.EVENT_READ, self._on_connection)
        addresses = [network.LOOPBACK]
        if not self.job.is_local:
            addresses = network.interface_addresses(self.job.interface)
            if not addresses:
                where = f" on interface {self.job.interface}" if self.job.interface else ""
                raise LaunchError(f"this host has no network address{where}; see ip address")
        port = listener.getsockname()[1]
        rendezvous = environment.Rendezvous(self._token, tuple(addresses), port)
        # First, not last: MPICH 5.0.2 forgets to forward the environment's last variable.
        environ = {environment.RENDEZVOUS: str(rendezvous), **environment.current()}
        for command in self.job.commands:
            read_end, write_end = os.pipe()
            launcher = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**environ, **command.environ},
                start_new_session=True,
            )
            os.close(write_end)
            self._launchers.append(launcher)
            self._selector.register(read_end, selectors.EVENT_READ, self._on_launcher)

    def wait(self) -> None:
        """Handle what arrives within a quarter of a second.

        Raises:
          Interrupted: a signal asked for the end of the job.
          LaunchError: an agent could not start its process.
        """
        for key, _ in self._selector.select(_SELECT_S):
            key.data(key.fileobj)
        if self._interrupt is not None:
            raise Interrupted(self._interrupt)

    def launchers_ended(self) -> bool:
        """Whether everything that was to start agents is gone."""
        return all(launcher.poll() is not None for launcher in self._launchers)

    def stop(self) -> None:
        """End all processes: SIGTERM, then SIGKILL, through their agents; let the agents go."""
        for member in self.members:
            if not member.over:
                member.send("stop", grace_s=_STOP_GRACE_S)
        until = time.monotonic() + _STOP_LIMIT_S
        while time.monotonic() < until and not all(member.over for member in self.members):
            with contextlib.suppress(Interrupted):
                self.wait()
        for member in self.members:
            if not member.over:
                member.kill_agent_if_here()
            member.send("done")

    # Events

    def _on_interrupt(self, number: int, _: FrameType | None) -> None:
        self._interrupt = number

    def _on_launcher(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        self.launcher_output += data.decode(errors="replace").splitlines()
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)

    def _on_connection(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        self._selector.register(Channel(sock), selectors.EVENT_READ, self._on_stranger)

    def _on_stranger(self, channel: Channel) -> None:
        """A connection becomes a member once it has shown the token; others are dropped."""
        try:
            messages = channel.receive()
        except (EOFError, OSError, ValueError):
            self._drop(channel)
            return
        if not messages:
            return
        hello = messages[0]
        if not hmac.compare_digest(str(hello.get("token", "")), self._token):
            self._drop(channel)
            return
        channel.trusted = True
        member = Member(channel, hello)
        self.members.append(member)
        self._selector.modify(channel, selectors.EVENT_READ, lambda _: self._on_member(member))

    def _on_member(self, member: Member) -> None:
        try:
            messages = member.channel.receive()
        except (EOFError, OSError, ValueError) as error:
            self._drop(member.channel)
            if failure := member.lose(error):
                self.failures.append(failure)
            return
        for message in messages:
            if message["kind"] == "line":
                member.heard_at = time.monotonic()
                self._console.line(member.process_id, message["stream"], message["text"])
            elif failure := member.update(message):
                self.failures.append(failure)

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()

    # The end

    def _close(self) -> None:
        """Leave nothing running: agents end with their connection, launchers by signals."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for launcher in self._launchers:
                if number is not None and launcher.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(launcher.pid, number)
            until = time.monotonic() + _LAUNCHER_EXIT_S
            while time.monotonic() < until and not self.launchers_ended():
                time.sleep(0.02)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
