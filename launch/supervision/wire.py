"""Messages between the supervisor and its agents: JSON in frames over one TCP connection.

A frame is a length (4 bytes, big-endian) and that many bytes of JSON. Text that is not valid
UTF-8 travels as the surrogates of ``surrogateescape``, which JSON keeps, so environment
variables and lines of a report arrive byte for byte.

Neither end ever waits in a send: what the other end cannot take yet stays in the channel. A peer
that vanishes without closing its connection (a cut network, a machine that lost power) is noticed
by the kernel, which gives up what is not confirmed within ``SILENCE_LIMIT_S``. A peer that is
stopped confirms as long as its receive buffer has room, so output, of which there may be any
amount, is sent only as far as the other end has dealt with it (``Flow``).
"""

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct(">I")
_MAX_FRAME = 64 << 20
_MAX_UNTRUSTED_FRAME = 64 << 10
_KEEPALIVE_IDLE_S = 2
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_PROBES = 4
SILENCE_LIMIT_S = _KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES
# Room for a `Flow` in small frames, and for the messages beside it. Linux gives up to 416 KiB.
RECEIVE_BUFFER = 1 << 19
_WINDOW = 64 << 10
_FRAME_COST = 256

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
        self._unsent = bytearray()
        self.on_kept: Callable[[], None] = lambda: None  # called when a send leaves something
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", 1000 * SILENCE_LIMIT_S),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def limit_silence(self, limit_s: float) -> None:
        """From now on the connection breaks when nothing is heard for about ``limit_s`` seconds."""
        interval_s = max(1, round(limit_s / 6))
        idle_s = max(1, round(limit_s / 3))
        for option, value in (
            ("TCP_KEEPIDLE", idle_s),
            ("TCP_KEEPINTVL", interval_s),
            ("TCP_KEEPCNT", max(1, round((limit_s - idle_s) / interval_s))),
            ("TCP_USER_TIMEOUT", round(1000 * limit_s)),
        ):
            if hasattr(socket, option):
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        """The socket's descriptor, so that a selector takes a channel."""
        return self.sock.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message, or keep what does not go out yet. Raises ``OSError`` as ``flush``."""
        body = json.dumps({"kind": kind, **fields}).encode("ascii")
        self._unsent += _LENGTH.pack(len(body)) + body
        self.flush()
        if self._unsent:
            self.on_kept()

    def flush(self) -> None:
        """Send what was kept, as far as it goes. Raises ``OSError`` if the other end is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to do once the socket is writable."""
        return bool(self._unsent)

    def receive(self) -> list[Message]:
        """Read what is there and return the complete messages, oldest first.

        Raises:
          EOFError: the other end closed the connection.
          OSError: the connection is broken.
          ValueError: the bytes are no messages of Stretto.
        """
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
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
            messages.append(_message(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def _message(body: bytes) -> Message:
    """The message in a frame; ValueError for anything else."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a message must not be nested so deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message must be an object with a kind")
    return message


class Flow:
    """How much output an agent may send: what the supervisor has not dealt with is limited."""

    def __init__(self):
        self._sent = 0
        self._taken = 0

    def add(self, num_bytes: int) -> None:
        """So much output was sent in one message."""
        self._sent += cost(num_bytes)

    def take(self, taken: int) -> None:
        """The supervisor has dealt with messages of this cost since the job began."""
        self._taken = taken

    @property
    def is_full(self) -> bool:
        """Whether no more may be sent until the supervisor has dealt with some of it."""
        return self._sent - self._taken >= _WINDOW


def cost(num_bytes: int) -> int:
    """What a message with so much output counts for: many small ones fill a buffer, too."""
    return num_bytes + _FRAME_COST
