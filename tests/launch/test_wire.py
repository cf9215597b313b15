"""Messages over a socket: whole, in order, byte for byte, and limited before trust."""

from __future__ import annotations

import socket
import struct

import pytest

from stretto.launch.supervision.wire import Channel


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    yield Channel(one, trusted=True), Channel(other)
    one.close()
    other.close()


def receive(sender, receiver, count):
    messages = []
    while len(messages) < count:
        sender.flush()
        messages += receiver.receive()
    return messages


def test_messages_arrive_whole_and_in_order(pair):
    sender, receiver = pair
    receiver.trusted = True
    text = "\udcff\x00\n'\"ä" * 20_000
    sender.send("a", n=1)
    sender.send("b", text=text)
    sender.send("c")
    assert receive(sender, receiver, 3) == [
        {"kind": "a", "n": 1},
        {"kind": "b", "text": text},
        {"kind": "c"},
    ]


def test_close_is_seen(pair):
    sender, receiver = pair
    sender.close()
    with pytest.raises(EOFError):
        while True:
            receiver.receive()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 20),
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 2) + b"{}",
        struct.pack(">I", 3) + b"{a}",
        struct.pack(">I", 60_000) + b"[" * 60_000,
        struct.pack(">I", 10) + b'{"kind":1}',
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_ours_is_refused(pair, data):
    sender, receiver = pair
    sender.sock.sendall(data)
    with pytest.raises(ValueError):
        while True:
            receiver.receive()
