"""What a start costs the supervisor grows no faster than the number of processes.

Agents are stand-ins in this process, so that a thousand of them are quick. Counted are messages
and calls of Python functions, not time.
"""

from __future__ import annotations

import selectors
import sys
import threading
from collections import Counter

import pytest

from stretto.launch import environment
from stretto.launch.planning import network
from stretto.launch.planning.job import Job
from stretto.launch.planning.layout import HostDevices, plan
from stretto.launch.supervision import supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.session import Session
from stretto.launch.supervision.start import begin
from stretto.launch.supervision.wire import Channel

NUM_HOSTS = 10
NUM_LINES = 3
ANSWERS = {
    "prepare": [("prepared", {"problem": None, "port": 1, "addresses": ["10.0.0.1"]})],
    "probe": [("probed", {"ok": True})],
    "start": [
        *[("output", {"stream": "stdout", "data": "bGluZQo="})] * NUM_LINES,
        ("ended", {"state": "exited", "number": 0, "age_s": 0.0}),
    ],
}


class StandIns(threading.Thread):
    """Agents that connect and answer, until the supervisor lets them go.

    Attributes:
      messages: how many were sent and received, by kind; those that time asks for are left out.
      failure: what went wrong in this thread.
    """

    def __init__(self, count: int, port: int, token: str):
        super().__init__(daemon=True)
        self._count, self._port, self._token = count, port, token
        self.messages: Counter[str] = Counter()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for index in range(self._count):
                    self._connect(selector, index)
                while selector.get_map():
                    for key, _ in selector.select():
                        self._serve(selector, key.fileobj)  # type: ignore[arg-type]
        except Exception as error:
            self.failure = error

    def _connect(self, selector: selectors.BaseSelector, index: int) -> None:
        sock = network.connect([network.LOOPBACK], self._port, 10)
        if sock is None:
            raise ConnectionError(f"agent {index} could not connect")
        channel = Channel(sock, trusted=True)
        host = f"host{index * NUM_HOSTS // self._count}"
        hello = {"index": index, "count": self._count, "host": host, "pid": 0, "versions": {}}
        channel.send("hello", token=self._token, **hello)
        self.messages["hello"] += 1
        selector.register(channel, selectors.EVENT_READ)

    def _serve(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except EOFError:
            messages = [{"kind": "done"}]
        for message in messages:
            kind = message["kind"]
            if kind not in ("ping", "taken", "done"):
                self.messages[kind] += 1
            for answer, fields in ANSWERS.get(kind, []):
                self.messages[answer] += 1
                channel.send(answer, **fields)
            if kind == "done":
                selector.unregister(channel)
                channel.close()
                return


@pytest.fixture
def cost_of(monkeypatch, tmp_path):
    """`cost_of(n)`: the messages of a job of n processes from their start to their end, and the
    calls of functions that the supervisor made for them."""
    monkeypatch.setattr(network, "interface_addresses", lambda *_: [network.LOOPBACK])

    def cost_of(count: int) -> tuple[Counter[str], int]:
        hosts = [HostDevices(f"host{i}", count // NUM_HOSTS) for i in range(NUM_HOSTS)]
        work = Job(plan(hosts, "cpu", None), ("script.py",), str(tmp_path), {"A": "1"}, ())
        console = Console(count, tmp_path / f"logs{count}", tee=frozenset())
        calls = 0

        def count_call(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event == "call"

        (tmp_path / f"logs{count}").mkdir()
        with Session(work, console) as session:
            agents: list[StandIns] = []

            def start_agents(_: object, environ: dict[str, str], __: object) -> None:
                rendezvous = environment.Rendezvous.parse(environ[environment.RENDEZVOUS])
                agents.append(StandIns(count, rendezvous.port, rendezvous.token))
                agents[0].start()

            monkeypatch.setattr(session.launchers, "start", start_agents)
            running = True
            monkeypatch.setattr(session.launchers, "have_ended", lambda: not running)
            session.start()
            sys.setprofile(count_call)
            try:
                begin(session)
                supervisor._follow(session)
            finally:
                sys.setprofile(None)
            running = False
            session.stop()
        agents[0].join(20)
        console.close()
        assert agents[0].failure is None
        logs = [log.read_text() for log in (tmp_path / f"logs{count}").iterdir()]
        assert logs == ["line\n" * NUM_LINES] * count
        return agents[0].messages, calls

    return cost_of


@pytest.mark.parametrize(
    "counts",
    [(10, 20, 60), pytest.param((10, 100, 1000), marks=pytest.mark.slow)],
    ids=["to 60", "to 1000"],
)
def test_start_costs_no_more_for_each_of_many_processes(cost_of, counts):
    costs = [cost_of(count) for count in counts]
    for count, (messages, _) in zip(counts, costs, strict=True):
        of_each = ("hello", "prepare", "prepared", "start", "ended")
        assert messages == {
            **dict.fromkeys(of_each, count),
            **dict.fromkeys(("probe", "probed"), NUM_HOSTS - 1),  # one of each other host
            "output": NUM_LINES * count,
        }
    (_, some), (_, many) = costs[1:]
    assert many / counts[2] < 1.5 * some / counts[1]
