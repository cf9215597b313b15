"""Whatever strangers send, the job's port drops them, says so, and stays open."""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import struct

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.supervision import door as door_module
from stretto.launch.supervision.door import Door
from stretto.launch.supervision.member import Member

TOKEN = "0123456789abcdef"
HELLO = {
    **{"kind": "hello", "token": TOKEN, "index": 0, "count": 1, "host": "h", "pid": 1},
    **{"versions": {"python": "3.12"}},
}


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def said(message: object) -> bytes:
    return framed(json.dumps(message).encode())


class Fixture:
    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.members: list[Member] = []
        self.said: list[str] = []
        self.door = Door(self.selector, TOKEN, self.admit, self.said.append)
        self.port = self.door.open([network.LOOPBACK], 0)

    def admit(self, channel, hello):
        self.members.append(Member(channel, hello))

    def serve(self, limit_s: float = 0.0) -> None:
        while found := self.selector.select(limit_s):
            for key, _ in found:
                key.data(key.fileobj)

    def send(self, data: bytes) -> bool:
        """Whether the connection that sends this is still there when all is handled."""
        with socket.create_connection((network.LOOPBACK, self.port)) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            num_members = len(self.members)
            self.serve(0.05)
            return len(self.members) > num_members


@pytest.fixture
def port():
    fixture = Fixture()
    yield fixture
    for key in list(fixture.selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    for member in fixture.members:
        member.channel.close()
    fixture.selector.close()


@pytest.mark.parametrize(
    "data",
    [
        said({"kind": "hello", "token": "\u00e4"}),
        said({"kind": "hello", "token": "\udcff"}),
        framed(b"[" * 60_000),
        framed(b'{"a":' * 10_000),
        said({"kind": "hello", "token": [TOKEN]}),
        said({"kind": ["hello"], "token": TOKEN}),
        said({"kind": "hello", "token": TOKEN[:-1]}),
        said({"kind": "hello", "token": TOKEN}),
        said(HELLO | {"index": "0"}),
        said(HELLO | {"versions": None}),
        said(HELLO | {"kind": "start"}),
        said(HELLO | {"token": ""}) + said(HELLO),
        framed(b'{"kind": "hello", "token": 1e999999}'),
        framed(b"9" * 60_000),
        framed(b"\xff\xfe"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 70_000,
    ],
)
def test_a_stranger_is_dropped_and_told_of(port, data):
    assert not port.send(data)
    (line,) = port.said
    assert "a connection from 127.0.0.1" in line and "\n" not in line
    assert port.send(said(HELLO))


def frame(draw: random.Random) -> bytes:
    """A frame that may be nearly right: a hello that was bent, cut, or is of another kind."""
    message: dict = dict(HELLO, token=draw.choice(["", "x", TOKEN[:-1], None, 7, {}, "\u20ac"]))
    for _ in range(draw.randrange(3)):
        name = draw.choice([*HELLO, "more"])
        message[name] = draw.choice([None, -1, 1 << 70, "", "\x00", [], {"a": {}}, True, 0.5])
    if message["token"] == TOKEN:
        message["token"] = ""
    body = bytearray(json.dumps(message).encode())
    for _ in range(draw.choice([0, 0, 1, 5])):
        body[draw.randrange(len(body))] = draw.randrange(256)
    whole = framed(bytes(body))
    how = draw.randrange(6)
    if how == 0:
        return whole[: draw.randrange(len(whole))]
    if how == 1:
        return draw.randbytes(draw.randrange(1, 80))
    if how == 2:
        return framed(draw.choice([b"[", b'{"a":', b"-", b'"']) * draw.randrange(1, 2000))
    return whole


def test_ten_thousand_frames_cost_no_job(port):
    draw = random.Random(22)
    for _ in range(100):
        strangers = []
        for _ in range(100):
            sock = socket.create_connection((network.LOOPBACK, port.port))
            with contextlib.suppress(ConnectionError):
                sock.sendall(frame(draw))
            strangers.append(sock)
        port.serve()
        for sock in strangers:
            sock.close()
        port.serve()
        assert not port.members
    assert len(port.said) == door_module._MOST_SAID
    assert port.send(said(HELLO))


def test_a_crowd_that_says_nothing(port, monkeypatch):
    monkeypatch.setattr(door_module, "_MOST_STRANGERS", 4)
    crowd = [socket.create_connection((network.LOOPBACK, port.port)) for _ in range(9)]
    port.serve(0.05)
    assert len(port.door._strangers) == 4
    monkeypatch.setattr(door_module, "_HELLO_LIMIT_S", -1.0)
    port.door.on_time()
    assert not port.door._strangers
    assert port.send(said(HELLO))
    for sock in crowd:
        sock.close()


def test_a_port_that_was_asked_for(port):
    with socket.create_server((network.LOOPBACK, 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {number} of 127.0.0.1 cannot be listened on"):
            port.door.open([network.LOOPBACK], number)
    assert port.door.open([network.LOOPBACK], number) == number


def test_it_listens_where_it_was_told_to_and_nowhere_else(port):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port.port))
