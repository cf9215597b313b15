"""Handing file descriptors to the other processes of a node.

A descriptor means something only in the process that has it; the system translates one that is sent
through a Unix socket. Each process listens on a socket of its own, whose name the others find in a
store that the job has in common. A taker connects to it, and three messages follow:

| Message | From | Proves |
|---|---|---|
| its number | the taker | which process is to be given the descriptor |
| the descriptor | the giver | nothing: the taker may have hung up before it came |
| `_TAKEN` | the taker | that process has the descriptor |

The giver listens until all the others have it. A taker that hangs up, at whatever step, has been
given nothing, and may come again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future
from typing import Protocol

LIMIT_S = 1800.0
"""Seconds until the others must connect: they may load data before their first kernel."""
_KIND = socket.SOCK_SEQPACKET  # A message arrives whole or not at all.
_NUMBER = struct.Struct("=q")
_TAKEN = b"taken"
_MESSAGE_BYTES = 64  # More than any has.
_RETRY_S = 0.01


class Store(Protocol):
    """What a job's processes have in common: names, each with a text."""

    def publish(self, key: str, value: str) -> None:
        """Gives `key` its value, once."""

    def look_up(self, key: str, limit_s: float) -> str:
        """The value of `key`, which may appear within that time; OSError if it does not."""
        ...


def exchange(
    descriptor: int,
    own: int,
    processes: Sequence[int],
    group: str,
    store: Store,
    *,
    limit_s: float = LIMIT_S,
) -> dict[int, int]:
    """Gives each of the other `processes` the descriptor, and returns theirs, which are new here.

    Args:
      descriptor: this process's.
      own: this process's number.
      processes: all numbers, this one's too; all on this host and of one user.
      group: names this exchange in the store.
      store: where the processes find each other.
      limit_s: how long that may take.

    Raises:
      OSError: a process did not connect, or cannot be reached.
    """
    deadline = time.monotonic() + limit_s
    others = [process for process in processes if process != own]
    missing, found = set(others), {}
    try:
        with _giving(descriptor, missing) as (name, given):
            store.publish(f"{group}/{own}", name)
            for process in others:
                with _explained(process, own):
                    name = store.look_up(f"{group}/{process}", _left(deadline))
                    found[process] = _take(name, own, deadline)
            try:
                given.result(_left(deadline))
            except TimeoutError:
                raise OSError(
                    f"processes {sorted(missing)} have not taken the memory of process {own}"
                    f" within {limit_s:g} s."
                ) from None
    except BaseException:
        for theirs in found.values():
            os.close(theirs)
        raise
    return found


def wait_for_all(own: int, processes: Sequence[int], group: str, store: Store) -> None:
    """Returns once all `processes` have called this with the same `group`; else OSError."""
    deadline = time.monotonic() + LIMIT_S
    store.publish(f"{group}/{own}", "1")
    for process in processes:
        if process != own:
            with _explained(process, own):
                store.look_up(f"{group}/{process}", _left(deadline))


def _left(deadline: float) -> float:
    """Seconds until `deadline`; a moment, if it is over."""
    return max(deadline - time.monotonic(), 1e-3)


@contextlib.contextmanager
def _explained(process: int, own: int) -> Generator[None]:
    """Says more of an OSError that `process` has caused."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"process {process} has not shared its GPU's memory with process {own} ({error})."
            " All processes of a node must call the same kernels, on one host, as one user."
        ) from error


def _abstract(name: str) -> str:
    return f"\0stretto-{name}"  # In no folder, and gone with the process.


@contextlib.contextmanager
def _giving(descriptor: int, missing: set[int]) -> Generator[tuple[str, Future[None]]]:
    """Gives the descriptor to all of `missing`, while the block lasts, and strikes them out.

    Yields the name to connect to, and what is done once none is missing. Nothing uses the
    descriptor after the block: its owner may close it then.
    """
    name, given = secrets.token_hex(16), Future[None]()

    def give() -> None:
        try:
            given.set_result(_give(server, descriptor, missing))
        except OSError as error:
            given.set_exception(error)

    with socket.socket(socket.AF_UNIX, _KIND) as server:
        server.bind(_abstract(name))
        server.listen()
        threading.Thread(target=give, daemon=True).start()
        try:
            yield name, given
        finally:
            server.shutdown(socket.SHUT_RDWR)  # The thread wakes, and ends before the socket is
            given.exception()  # closed, which would not wake it.


def _give(server: socket.socket, descriptor: int, missing: set[int]) -> None:
    """Serves all connections at the same time: a silent one does not delay the others.

    Returns once none is missing. OSError: the server was shut down, or has no room for connections.
    """
    known = frozenset(missing)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        selector.register(server, selectors.EVENT_READ)
        while missing:
            for key, _ in selector.select():
                if key.fileobj is server:
                    connection = connections.enter_context(server.accept()[0])
                    connection.setblocking(False)
                    talk = _hand_over(connection, descriptor, known, missing)
                else:
                    connection, talk = key.data
                    selector.unregister(connection)
                with contextlib.suppress(OSError, StopIteration):
                    next(talk)
                    selector.register(connection, selectors.EVENT_READ, (connection, talk))
                    continue
                connection.close()


def _hand_over(
    connection: socket.socket, descriptor: int, known: Collection[int], missing: set[int]
) -> Generator[None]:
    """The giver's half of the messages; each `yield` waits for one of the taker's, or its end.

    Returns, or raises OSError, when there is no more to say.
    """
    if _user_of(connection) != os.getuid():
        return
    yield
    number = connection.recv(_MESSAGE_BYTES)
    if len(number) != _NUMBER.size or (process := _NUMBER.unpack(number)[0]) not in known:
        return
    socket.send_fds(connection, [b"\0"], [descriptor])
    yield
    if connection.recv(_MESSAGE_BYTES) == _TAKEN:
        missing.discard(process)


def _take(name: str, own: int, deadline: float) -> int:
    """The taker's half, of process `own`: the descriptor of who listens at `name`."""
    with socket.socket(socket.AF_UNIX, _KIND) as connection:
        _connect(connection, name, deadline)
        connection.settimeout(_left(deadline))
        connection.send(_NUMBER.pack(own))
        _, descriptors, flags, _ = socket.recv_fds(
            connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not descriptors:
            full = flags & socket.MSG_CTRUNC
            raise OSError("this process can open no more files" if full else "it sent nothing")
        try:
            connection.send(_TAKEN)
        except OSError:
            os.close(descriptors[0])
            raise
    return descriptors[0]


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    """Connects, and waits for room where many others wait to be served."""
    connection.settimeout(_left(deadline))
    while True:
        try:
            return connection.connect(_abstract(name))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return user
