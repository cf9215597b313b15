"""Hosts that come late, or whose ssh server is not one or hangs."""

from __future__ import annotations

import socket
import threading

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network, reach

ADDRESS = "192.0.2.7"  # of documentation


@pytest.fixture
def server(monkeypatch):
    """`server(greeting)`: what answers at port 22 of every host; None hangs."""
    listeners = []
    monkeypatch.setattr(network, "is_this_host", lambda name: False)
    monkeypatch.setattr(network, "resolve", lambda name: [ADDRESS])
    monkeypatch.setattr(reach, "_CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(reach, "_TRY_EVERY_S", 0.05)

    def start(greeting: bytes | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        settings = {"hostname": "127.0.0.1", "port": str(listener.getsockname()[1])}
        monkeypatch.setattr(reach, "ssh_settings", lambda name: settings)
        held = []

        def serve():
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                held.append(sock)
                if greeting is not None:
                    sock.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()

    yield start
    for listener in listeners:
        listener.close()


def check(limit_s: float, *names: str) -> list[str]:
    said: list[str] = []
    reach.check_hosts(names, {}, limit_s, said.append)
    return said


def test_an_ssh_server_is_heard(server):
    server(b"SSH-2.0-OpenSSH_9.2p1\r\n")
    assert check(5, "a", "b") == []


@pytest.mark.parametrize(
    ("greeting", "why"), [(None, "no answer"), (b"HTTP/1.1", "is no ssh server")]
)
def test_one_that_hangs_or_is_none_is_named(server, greeting, why):
    server(greeting)
    with pytest.raises(LaunchError, match=f"host b cannot be reached by ssh .*{why}"):
        check(0.2, "b")


def test_hosts_that_come_late_are_waited_for_and_named(server, monkeypatch):
    server(b"SSH-2.0-x\r\n")
    tries = {"b": 3, "c": 1}

    def resolve(name: str) -> list[str]:
        if name in tries and tries[name] > 0:
            tries[name] -= 1
            return []
        return [ADDRESS]

    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(reach, "ssh_settings", lambda name: {"hostname": name})
    monkeypatch.setattr(reach, "_silence", lambda host, port: None)
    (line,) = check(20, "a", "b", "c")
    assert "host b does not resolve" in line and "host c" in line and "host a" not in line
    assert "waiting up to 20 s" in line
    assert tries == {"b": 0, "c": 0}


def test_this_machine_needs_no_server():
    assert check(0, "localhost", socket.gethostname(), "me@localhost") == []
