"""File descriptors that processes hand each other, here threads of one."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from stretto.distributed import sharing


class Store:
    """What `jax_store` is for a job."""

    def __init__(self):
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._values, f"{key} is published twice"
            self._values[key] = value
            self._changed.notify_all()

    def look_up(self, key: str, limit_s: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, limit_s):
                raise OSError(f"nothing came within {limit_s:g} s")
            return self._values[key]


def file_with(text: str) -> int:
    descriptor = os.memfd_create("shared")
    os.write(descriptor, text.encode())
    return descriptor


def together(processes, group="test", store=None):
    """What each of `processes` reads in the descriptors that it got."""
    store, read = store or Store(), {}

    def run(process):
        found = sharing.exchange(file_with(f"of {process}"), process, processes, group, store)
        read[process] = {p: os.pread(d, 100, 0).decode() for p, d in found.items()}
        for descriptor in found.values():
            os.close(descriptor)

    threads = [threading.Thread(target=run, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read


@pytest.mark.parametrize("processes", [(0, 1), (4, 5, 6, 7), tuple(range(12))])
def test_each_gets_everybodys(processes):
    read = together(processes)
    assert read == {p: {q: f"of {q}" for q in processes if q != p} for p in processes}


def test_groups_do_not_disturb_each_other():
    store = Store()
    assert together((0, 1), "one", store) == together((0, 1), "other", store)


def test_no_descriptor_is_left_open():
    own = file_with("own")
    before = len(os.listdir("/proc/self/fd"))
    together((0, 1, 2))
    assert len(os.listdir("/proc/self/fd")) == before + 3  # Those that `together` makes.
    os.close(own)


def test_a_process_that_does_not_come():
    with pytest.raises(OSError, match="process 1 has not shared its GPU's memory with process 0"):
        sharing.exchange(file_with(""), 0, (0, 1), "test", Store(), limit_s=0.2)


def test_a_process_that_has_ended():
    store = Store()
    store.publish("test/1", "nobody listens here")
    with pytest.raises(OSError, match=r"process 1 has not shared .* on one host, as one user"):
        sharing.exchange(file_with(""), 0, (0, 1), "test", store, limit_s=0.2)


def test_another_user_gets_nothing(monkeypatch):
    monkeypatch.setattr(sharing, "_user_of", lambda connection: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(sharing._abstract("of a test"))
        server.listen(1)
        server.settimeout(0.3)
        giving = threading.Thread(target=sharing._give, args=(server, file_with(""), 1))
        giving.start()
        with pytest.raises(OSError, match="it sent nothing"):
            sharing._take("of a test", 5)
        giving.join()


def test_one_that_goes_away_keeps_nobody_out():
    store = Store()
    own = file_with("own")
    result = {}

    def share():
        result.update(sharing.exchange(own, 0, (0, 1), "test", store))

    thread = threading.Thread(target=share)
    thread.start()
    name = store.look_up("test/0", 5)
    for _ in range(3):  # They connect and hang up.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nobody:
            nobody.connect(sharing._abstract(name))
            nobody.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    found = sharing.exchange(file_with("of 1"), 1, (0, 1), "test", store)
    thread.join()
    assert os.pread(found[0], 9, 0) == b"own" and os.pread(result[1], 9, 0) == b"of 1"


def test_all_are_waited_for():
    store, done = Store(), []

    def late():
        sharing.wait_for_all(1, (0, 1), "ready", store)
        done.append(1)

    thread = threading.Thread(target=late)
    thread.start()
    assert not done
    sharing.wait_for_all(0, (0, 1), "ready", store)
    thread.join()
    assert done == [1]
