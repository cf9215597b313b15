"""The agent of each process: started by mpirun, by srun or directly, one per process.

An agent connects to the supervisor, reports its host, receives the script, and runs it in a
worker with a session of its own. It forwards the worker's output and exit status,
and ends the worker on request, when its launcher ends it, or when the supervisor is gone. So
nothing depends on how an MPI library forwards environment, output or signals, and a job whose
network is cut ends on both sides of the cut.

Messages to the agent: ``prepare``, ``probe``, ``start``, ``stdin``, ``stop``, ``stacks``, ``look``,
``ping``, ``taken``, ``done``.
Messages from it: ``hello``, ``prepared``, ``probed``, ``refused``, ``output``, ``failure``,
``program``, ``alone``, ``finished``, ``joins``, ``progress``, ``stacks``, ``looked``, ``pong``,
``stdin``, ``stopped``, ``continued``, ``ended``.
"""

import base64
import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from stretto.launch import environment
from stretto.launch.planning import network
from stretto.launch.process.detection import fingerprint
from stretto.launch.supervision import descendants, host_checks, stillness
from stretto.launch.supervision.child import Child, Pipe, StateChange
from stretto.launch.supervision.gpu_checks import take_gpus
from stretto.launch.supervision.introduction import introduction, signal_pipe
from stretto.launch.supervision.outlet import STREAMS
from stretto.launch.supervision.records import KINDS, parse_record
from stretto.launch.supervision.stdin import Sink
from stretto.launch.supervision.wire import Channel, Flow, Message

_CONNECT_TIMEOUT_S = 4.0
_PROBE_TIMEOUT_S = 3.0
_DRAIN_TIMEOUT_S = 0.5
_DAEMON_GRACE_S = 3.0
_DAEMONS = ("orted", "prted", "hydra_pmi_proxy")


def main() -> int:
    """Connect, serve one worker, and return this process's exit status."""
    environ = environment.current()
    hello = introduction(environ)  # first: who connects is expected to speak at once
    rendezvous = environment.Rendezvous.parse(environ[environment.RENDEZVOUS])
    sock = network.connect(rendezvous.addresses, rendezvous.port, _CONNECT_TIMEOUT_S)
    if sock is None:
        where = f"{' or '.join(rendezvous.addresses)} port {rendezvous.port}"
        print(
            f"stretto: host {socket.gethostname()} cannot reach the supervisor at {where}; "
            "check the network and firewalls between them",
            file=sys.stderr,
        )
        return 1
    descendants.adopt_orphans()
    return Agent(Channel(sock, trusted=True), environ).serve({**hello, "token": rendezvous.token})


class Agent:
    """The state of one agent; ``serve`` is its whole life."""

    def __init__(self, channel: Channel, environ: dict[str, str]):
        self._channel = channel
        self._flow = Flow()
        self._paused: list[Pipe] = []
        self._grace_s = 0.0
        self._environ = environ
        self._child: Child | None = None
        self._ended: StateChange | None = None
        self._ended_at = 0.0
        self._ended_by = 0  # the signal by which the launcher ended this agent and its worker
        self._kill_at: float | None = None
        self._drain_until: float | None = None
        self._probe_socket: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._done: int | None = None

    def serve(self, hello: Message) -> int:
        """Handle messages, output and signals until the supervisor lets go. Returns a status.

        Args:
          hello: the fields of the first message.
        """
        wakeup = signal_pipe()
        self._selector.register(wakeup, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_channel)
        try:
            self._channel.send("hello", **hello)
            while self._done is None:
                for key, _ in self._selector.select(self._next_timeout()):
                    if key.fileobj in self._selector.get_map():  # not closed by another event
                        key.data(key.fileobj)
                self._on_time()
                self._await_room()
            return self._done
        except (EOFError, OSError, ValueError) as error:
            return self._abandon(cut=not isinstance(error, EOFError))

    def _await_room(self) -> None:
        """Hear of the moment at which the channel takes more, if it has kept something."""
        writable = selectors.EVENT_WRITE if self._channel.has_unsent else 0
        self._selector.modify(self._channel, selectors.EVENT_READ | writable, self._on_channel)

    def _on_channel(self, channel: Channel) -> None:
        channel.flush()
        for message in channel.receive():
            match message["kind"]:
                case "prepare":
                    self._prepare(message)
                case "probe":
                    sock = network.connect([message["address"]], message["port"], _PROBE_TIMEOUT_S)
                    if sock is not None:
                        sock.close()
                    channel.send("probed", address=message["address"], ok=sock is not None)
                case "start":
                    self._start(message)
                case "stop" if self._child is not None:
                    if message["grace_s"]:
                        self._child.ask_to_end(message["signal"])
                    self._kill_at = time.monotonic() + message["grace_s"]
                case "stdin" if self._child is not None and self._child.stdin is not None:
                    self._feed(self._child.stdin, message["data"].encode("latin-1"))
                case "stacks" if self._child is not None:
                    channel.send("progress", progress=self._progress())
                    self._child.ask_for_stacks()
                case "look" if self._child is not None:
                    seen = stillness.look(self._child.pid)
                    channel.send(
                        "looked",
                        seen=dataclasses.asdict(seen) if seen else None,
                        progress=self._progress(),
                    )
                case "ping":
                    channel.send("pong")
                case "taken":
                    self._flow.take(message["cost"])
                    self._resume()
                case "stop" | "done":
                    self._done = 0

    def _prepare(self, message: Message) -> None:
        """Check what the job needs of this host, and offer a port for JAX's coordinator."""
        self._channel.limit_silence(message["silence_limit_s"])
        problem = host_checks.problem(message)
        if problem is None and message["devices"]:
            problem = take_gpus(message, self._environ)
        port = None
        if message["offer_port"] and problem is None:
            try:
                self._probe_socket = network.listen(network.ANY, message["port"])
                port = self._probe_socket.getsockname()[1]
            except OSError as error:
                problem = (
                    f"port {message['port']} of host {socket.gethostname()} cannot be listened on "
                    f"({error.strerror}); choose another --port, or none"
                )
        addresses = network.interface_addresses(message["interface"])
        self._channel.send("prepared", problem=problem, port=port, addresses=addresses)

    def _start(self, message: Message) -> None:
        if self._probe_socket is not None:
            self._probe_socket.close()
        self._grace_s = message["grace_s"]
        environ = environment.for_worker(self._environ, message["environ"])
        environ[environment.OUTER] = fingerprint(environ)
        try:
            self._child = Child(
                message["arguments"], environ, message["cwd"], takes_stdin=message["takes_stdin"]
            )
        except OSError as error:
            self._channel.send("refused", problem=f"cannot start {message['arguments']}: {error}")
            return
        for pipe in self._child.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, self._on_output)

    def _feed(self, sink: Sink, data: bytes) -> None:
        """Pass a piece of input to the worker; requests the next once the worker has it."""
        with contextlib.suppress(OSError):  # it reads no more
            if sink.put(data):
                self._channel.send("stdin")
            elif data:
                self._selector.register(sink, selectors.EVENT_WRITE, self._on_room)

    def _on_room(self, sink: Sink) -> None:
        try:
            taken = sink.flush()
        except OSError:
            self._selector.unregister(sink)
            return
        if taken:
            self._selector.unregister(sink)
            self._channel.send("stdin")

    def _on_output(self, pipe: Pipe) -> None:
        data = pipe.read()
        if data is None:
            return
        if pipe.name in STREAMS:
            self._pass_on(pipe, data)
        else:
            for line in pipe.lines(data):
                self._tell(pipe.name, line)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()

    def _pass_on(self, pipe: Pipe, data: bytes) -> None:
        """Send output, and read no more of it while the supervisor has too much to deal with."""
        if not data:
            return
        text = base64.b64encode(data).decode("ascii")
        self._channel.send("output", stream=pipe.name, data=text)
        self._flow.add(len(data))
        if self._flow.is_full and self._ended is None:
            self._selector.unregister(pipe)
            self._paused.append(pipe)

    def _resume(self) -> None:
        """Read output again, if there is room for it, or if the worker will write no more."""
        if not self._flow.is_full or self._ended is not None:
            for pipe in self._paused:
                self._selector.register(pipe, selectors.EVENT_READ, self._on_output)
            self._paused.clear()

    def _tell(self, pipe_name: str, line: str) -> None:
        if pipe_name == "stacks":
            self._channel.send("stacks", text=line)
            return
        if (record := parse_record(line)) is not None:
            kind = next((kind for kind in KINDS if kind in record), "failure")
            self._channel.send(kind, record=record, progress=self._progress())

    def _progress(self) -> str:
        return self._child.progress() if self._child is not None else ""

    def _on_signals(self, wakeup: socket.socket) -> None:
        numbers = set(wakeup.recv(4096))
        if numbers & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}:
            if self._child is None or self._ended is not None:
                self._done = 1
            elif self._kill_at is None:
                self._ended_by = min(numbers & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
                self._child.ask_to_end()
                self._kill_at = time.monotonic() + self._grace_s
        if self._child is None:
            return
        for change in self._child.changes():
            if change.state in ("exited", "killed"):
                self._ended = change
                self._ended_at = time.monotonic()
                self._drain_until = self._ended_at + _DRAIN_TIMEOUT_S
                self._child.kill()  # what it left behind
                self._resume()
            else:
                self._channel.send(change.state, signal=change.number)
        self._child.reap_orphans()

    def _next_timeout(self) -> float | None:
        moments = [moment for moment in (self._kill_at, self._drain_until) if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._child is None:
            return
        if self._kill_at is not None and now >= self._kill_at:
            self._child.kill()
            self._kill_at = None
        if self._ended is not None and self._drain_until is not None:
            open_pipes = any(isinstance(k.fileobj, Pipe) for k in self._selector.get_map().values())
            if not open_pipes or now >= self._drain_until:
                self._drain_until = None
                self._channel.send(
                    "ended",
                    state=self._ended.state,
                    number=self._ended.number,
                    age_s=now - self._ended_at,
                    progress=self._progress(),
                    by_launcher=self._ended_by,
                )

    def _abandon(self, *, cut: bool) -> int:
        """The supervisor is gone: end the worker, and behind a cut also the launcher's daemon.

        A daemon of mpirun's on the far side of a cut network may wait for minutes and ignore
        SIGTERM; by then its whole job is dead.
        """
        if self._child is not None:
            self._child.kill()
        parent = os.getppid()
        if cut and _process_name(parent) in _DAEMONS:
            time.sleep(_DAEMON_GRACE_S)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
        return 1


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
