"""The launcher's hand on each process: started by mpirun, srun or directly, one a process.

An agent connects to the supervisor, says where it is, gets the script to run, and runs it in a
worker of its own session. It passes on every line the worker writes and how the worker ended,
and ends the worker when told to, when its launcher ends it, or when the supervisor is gone. So
nothing depends on how an MPI library forwards environment, output or signals, and a job whose
network is cut ends on both sides of the cut.

Messages to the agent: ``prepare``, ``probe``, ``start``, ``stop``, ``stacks``, ``done``.
Messages from it: ``hello``, ``prepared``, ``probed``, ``refused``, ``line``, ``failure``,
``progress``, ``stacks``, ``stopped``, ``continued``, ``ended``.
"""

import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

from stretto.launch import environment
from stretto.launch.planning import network
from stretto.launch.process.detection import detect
from stretto.launch.supervision.child import Child, Pipe, StateChange
from stretto.launch.supervision.wire import Channel, Message

_CONNECT_TIMEOUT_S = 4.0
_PROBE_TIMEOUT_S = 3.0
_DRAIN_TIMEOUT_S = 0.5
_DAEMON_GRACE_S = 3.0
_DAEMONS = ("orted", "prted", "hydra_pmi_proxy")


def main() -> int:
    """Connect, serve one worker, and return this process's exit status."""
    environ = environment.current()
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
    return Agent(Channel(sock, trusted=True), environ, rendezvous.token).serve()


class Agent:
    """The state of one agent; ``serve`` is its whole life."""

    def __init__(self, channel: Channel, environ: dict[str, str], token: str):
        self._token = token
        self._channel = channel
        self._environ = environ
        self._child: Child | None = None
        self._ended: StateChange | None = None
        self._ended_at = 0.0
        self._kill_at: float | None = None
        self._drain_until: float | None = None
        self._probe_socket: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._done: int | None = None

    def serve(self) -> int:
        """Handle messages, output and signals until the supervisor lets go. Returns a status."""
        wakeup = _signal_pipe()
        self._selector.register(wakeup, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_messages)
        try:
            self._channel.send("hello", **self._introduction())
            while self._done is None:
                for key, _ in self._selector.select(self._next_timeout()):
                    if key.fileobj in self._selector.get_map():  # not closed by another event
                        key.data(key.fileobj)
                self._on_time()
            return self._done
        except (EOFError, OSError, ValueError) as error:
            return self._abandon(cut=not isinstance(error, EOFError))

    def _introduction(self) -> Message:
        launched = detect(self._environ)
        index = self._environ.get(environment.AGENT_INDEX)
        return {
            "token": self._token,
            "index": int(index) if index else (launched.process_id if launched else 0),
            "count": None if index else (launched.num_processes if launched else 1),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": {"python": platform.python_version(), **_versions("stretto", "jax")},
        }

    def _on_messages(self, channel: Channel) -> None:
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
                    self._child.ask_to_end()
                    self._kill_at = time.monotonic() + message["grace_s"]
                case "stacks" if self._child is not None:
                    channel.send("progress", progress=self._progress())
                    self._child.signal(signal.SIGUSR1)
                case "stop" | "done":
                    self._done = 0

    def _prepare(self, message: Message) -> None:
        """Check what the job needs of this host, and offer a port for JAX's coordinator."""
        problem = None
        name = socket.gethostname()
        if not Path(message["cwd"]).is_dir():
            problem = f"the working directory {message['cwd']} does not exist on host {name}"
        elif not Path(message["cwd"], message["script"]).is_file():
            problem = f"the script {message['script']} does not exist on host {name}"
        elif message["needs_host_name"]:
            problem = _host_name_problem(name, many_hosts=message["many_hosts"])
        port = None
        if message["offer_port"] and problem is None:
            self._probe_socket = network.listen("0.0.0.0", message["port"])
            port = self._probe_socket.getsockname()[1]
        addresses = network.interface_addresses(message["interface"])
        self._channel.send("prepared", problem=problem, port=port, addresses=addresses)

    def _start(self, message: Message) -> None:
        if self._probe_socket is not None:
            self._probe_socket.close()
        environ = environment.for_worker(self._environ, message["environ"])
        try:
            self._child = Child(message["arguments"], environ, message["cwd"])
        except OSError as error:
            self._channel.send("refused", problem=f"cannot start {message['arguments']}: {error}")
            return
        for pipe in self._child.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, self._on_output)

    def _on_output(self, pipe: Pipe) -> None:
        lines, more = pipe.read()
        for line in lines:
            if pipe.name == "record":
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    kind = "program" if "program" in record else "failure"
                    self._channel.send(kind, record=record, progress=self._progress())
            else:
                self._channel.send(
                    "stacks" if pipe.name == "stacks" else "line", stream=pipe.name, text=line
                )
        if not more:
            self._selector.unregister(pipe)
            pipe.close()

    def _progress(self) -> str:
        return self._child.progress() if self._child is not None else ""

    def _on_signals(self, wakeup: socket.socket) -> None:
        numbers = set(wakeup.recv(4096))
        if numbers & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}:
            if self._child is None or self._ended is not None:
                self._done = 1
            elif self._kill_at is None:
                self._child.ask_to_end()
                self._kill_at = time.monotonic() + 1.0
        if self._child is None:
            return
        for change in self._child.changes():
            if change.state in ("exited", "killed"):
                self._ended = change
                self._ended_at = time.monotonic()
                self._drain_until = self._ended_at + _DRAIN_TIMEOUT_S
                self._child.signal_group(signal.SIGKILL)  # what it left behind
            else:
                self._channel.send(change.state, signal=change.number)

    def _next_timeout(self) -> float | None:
        moments = [moment for moment in (self._kill_at, self._drain_until) if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._child is None:
            return
        if self._kill_at is not None and now >= self._kill_at:
            self._child.signal_group(signal.SIGKILL)
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
                )

    def _abandon(self, *, cut: bool) -> int:
        """The supervisor is gone: end the worker, and behind a cut also the launcher's daemon.

        A daemon of mpirun's on the far side of a cut network may wait for minutes and ignore
        SIGTERM; by then its whole job is dead.
        """
        if self._child is not None:
            self._child.signal_group(signal.SIGKILL)
        parent = os.getppid()
        if cut and _process_name(parent) in _DAEMONS:
            time.sleep(_DAEMON_GRACE_S)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
        return 1


def _signal_pipe() -> socket.socket:
    """A socket that becomes readable with the numbers of the signals that arrive."""
    read_end, write_end = socket.socketpair()
    for end in (read_end, write_end):
        end.setblocking(False)
    signal.set_wakeup_fd(write_end.detach())
    # Ignored signals stay ignored in a new program: a worker asked for its stacks before it has
    # its handler does not die of the question.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return read_end


def _host_name_problem(name: str, *, many_hosts: bool) -> str | None:
    """Why CPU collectives, which listen on the host name's address, would hang here."""
    addresses = network.resolve(name)
    if not addresses:
        return (
            f"the host name {name} does not resolve on its own host, and CPU collectives need it; "
            f"add '127.0.0.1 {name}' (or its network address) to /etc/hosts"
        )
    if many_hosts and all(address.startswith("127.") for address in addresses):
        return (
            f"the host name {name} means {addresses[0]} on its own host, which others cannot "
            f"reach; give {name} its network address in /etc/hosts"
        )
    return None


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
