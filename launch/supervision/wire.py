"""Messages between the supervisor and its agents: JSON in frames over one TCP connection.

A frame is a length (4 bytes, big-endian) and that many bytes of JSON. Text that is not valid
UTF-8 travels as the surrogates of ``surrogateescape``, which JSON keeps, so environment
variables and output lines arrive byte for byte.

A peer that vanishes without closing its connection (a cut network, a machine that lost power)
is noticed by the kernel's keep-alive probes, not by messages of ours: a supervisor that is
merely blocked, say by a paused terminal, still counts as alive.
"""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_MAX_FRAME = 64 << 20
_MAX_UNTRUSTED_FRAME = 64 << 10
_KEEPALIVE_IDLE_S = 2
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_PROBES = 4
_SILENCE_LIMIT_S = _KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES

Message = dict[str, Any]


class Channel:
    """One end of a connection that carries messages.

    ``trusted`` lifts the frame limit from 64 KiB to 64 MiB; the supervisor sets it once the
    other end has shown the job's token.
    """

    def __init__(self, sock: socket.socket, *, trusted: bool = False):
        self.sock = sock
        self.trusted = trusted
        self._buffer = bytearray()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", 1000 * _SILENCE_LIMIT_S),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        """The socket's descriptor, so that a selector takes a channel."""
        return self.sock.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises ``OSError`` if the other end is gone."""
        body = json.dumps({"kind": kind, **fields}).encode("ascii")
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> list[Message]:
        """Read what is there and return the complete messages, oldest first.

        Raises:
          EOFError: the other end closed the connection.
          OSError: the connection is broken.
          ValueError: the bytes are not messages of ours.
        """
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError("connection closed")
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            limit = _MAX_FRAME if self.trusted else _MAX_UNTRUSTED_FRAME
            if length > limit:
                raise ValueError(f"frame of {length} bytes exceeds the limit of {limit}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            message = json.loads(bytes(self._buffer[_LENGTH.size : end]))
            if not isinstance(message, dict) or "kind" not in message:
                raise ValueError("a message must be an object with a kind")
            messages.append(message)
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()
