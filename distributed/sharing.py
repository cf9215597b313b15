"""Handing file descriptors to the other processes of a node.

A descriptor means something only in the process that has it; the system translates one that is sent
through a Unix socket. Each process listens on a socket of its own, whose name the others find in a
store that the job has in common.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from typing import Protocol

LIMIT_S = 1800.0
"""Seconds that the others may take to come: they may load data before their first kernel."""


class Store(Protocol):
    """What a job's processes have in common: names, each with a text."""

    def publish(self, key: str, value: str) -> None:
        """Gives `key` its value, once."""

    def look_up(self, key: str, limit_s: float) -> str:
        """The value of `key`, which may take so long to come; OSError if it does not."""
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
      OSError: a process did not come, or cannot be reached.
    """
    others = [process for process in processes if process != own]
    name = secrets.token_hex(16)
    found: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(_abstract(name))
        server.listen()  # A connection that finds no room is refused, not kept waiting.
        server.settimeout(limit_s)
        store.publish(f"{group}/{own}", name)
        giving = threading.Thread(target=_give, args=(server, descriptor, len(others)), daemon=True)
        giving.start()
        try:
            for process in others:
                with _explained(process, own):
                    name = store.look_up(f"{group}/{process}", limit_s)
                    found[process] = _take(name, limit_s)
            giving.join(limit_s)
            if giving.is_alive():
                raise OSError(f"not all of processes {others} took the memory of process {own}.")
        except OSError:
            for theirs in found.values():
                os.close(theirs)
            raise
    return found


def wait_for_all(
    own: int, processes: Sequence[int], group: str, store: Store, *, limit_s: float = LIMIT_S
) -> None:
    """Returns once all `processes` have called this with the same `group`; else OSError."""
    store.publish(f"{group}/{own}", "1")
    for process in processes:
        if process != own:
            with _explained(process, own):
                store.look_up(f"{group}/{process}", limit_s)


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


def _give(server: socket.socket, descriptor: int, times: int) -> None:
    given = 0
    while given < times:
        try:
            connection, _ = server.accept()
        except OSError:  # Nobody came, or the other half has given up.
            return
        # Whoever goes away before it has got anything has it to itself.
        with connection, contextlib.suppress(OSError):
            if _user_of(connection) == os.getuid():
                socket.send_fds(connection, [b"\0"], [descriptor])
                given += 1


def _take(name: str, limit_s: float) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit_s)
        connection.connect(_abstract(name))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise OSError("it sent nothing")
    return descriptors[0]


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return user
