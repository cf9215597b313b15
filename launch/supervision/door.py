"""The port at which agents connect: connections without the job's token are dropped.

Anybody who reaches the port may send anything. Nothing that a stranger does ends the job, and a
crowd of them takes no more than a few descriptors each for a few seconds.
"""

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.supervision.wire import RECEIVE_BUFFER, Channel, Message

_HELLO_LIMIT_S = 10.0
_MOST_STRANGERS = 512
_MOST_SAID = 3
_TRIES_OF_A_FREE_PORT = 8


class Door:
    """Listens, and returns the connections that have shown the token.

    Args:
      selector: registers the sockets; the keys' data are the functions to call.
      token: what an agent's first message must have.
      admit: takes a connection and its first message; ValueError turns it away.
      num_expected: how many agents may come at the same time.
      say: called with a line about each dropped connection.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: str,
        admit: Callable[[Channel, Message], None],
        say: Callable[[str], None],
        num_expected: int = 0,
    ):
        self._selector = selector
        self._token = token.encode()
        self._admit = admit
        self._say = say
        self._strangers: dict[Channel, tuple[str, float]] = {}  # from where, since when
        self._num_dropped = 0
        self._num_expected = num_expected

    def open(self, addresses: Sequence[str], port: int) -> int:
        """Listen on these addresses, at one port (0: any free one), which is returned.

        Raises:
          LaunchError: the port is taken, or an address is not this host's.
        """
        attempts = 1 if port else _TRIES_OF_A_FREE_PORT
        for attempt in range(attempts):
            try:
                listeners = _listen(addresses, port)
                break
            except OSError as error:
                if attempt == attempts - 1:
                    where = " and ".join(addresses)
                    raise LaunchError(
                        f"port {port} of {where} cannot be listened on ({error.strerror}); choose "
                        "another --control-port, or none"
                    ) from None
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._on_connection)
        return listeners[0].getsockname()[1]

    def on_time(self) -> None:
        """Drop connections that were silent for too long."""
        now = time.monotonic()
        for channel, (_, since) in list(self._strangers.items()):
            if now > since + _HELLO_LIMIT_S:
                self._drop(channel, "sent nothing")

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
            channel = Channel(sock)
        except OSError:
            return  # gone again, or too many: it will try again
        if len(self._strangers) >= _MOST_STRANGERS + self._num_expected:
            self._drop(next(iter(self._strangers)), "was one of too many")
        self._strangers[channel] = (str(address[0]), time.monotonic())
        self._selector.register(channel, selectors.EVENT_READ, self._on_stranger)

    def _on_stranger(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except EOFError:
            self._drop(channel, None)
            return
        except (OSError, ValueError):
            self._drop(channel, "sent what is no message of an agent")
            return
        if not messages:
            return
        hello, *more = messages
        shown = str(hello.get("token", "")).encode("utf-8", "surrogatepass")
        if more or not hmac.compare_digest(shown, self._token):
            self._drop(channel, "did not show the job's token")
            return
        self._selector.unregister(channel)
        where, _ = self._strangers.pop(channel)
        channel.trusted = True
        try:
            self._admit(channel, hello)
        except ValueError:
            channel.close()
            self._tell(where, "showed the job's token, but is no agent of this version")

    def _drop(self, channel: Channel, why: str | None) -> None:
        where, _ = self._strangers.pop(channel)
        self._selector.unregister(channel)
        channel.close()
        if why is not None:
            self._tell(where, why)

    def _tell(self, where: str, why: str) -> None:
        self._num_dropped += 1
        if self._num_dropped <= _MOST_SAID:
            last = "; further ones are not reported" if self._num_dropped == _MOST_SAID else ""
            self._say(f"stretto: a connection from {where} {why} and was dropped{last}")


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket for each address, at one port."""
    with contextlib.ExitStack() as opened:
        listeners = []
        for address in addresses:
            listener = network.listen(address, port, receive_buffer=RECEIVE_BUFFER)
            listeners.append(opened.enter_context(listener))
            port = listener.getsockname()[1]
        opened.pop_all()
        return listeners
