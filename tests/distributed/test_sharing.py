"""File descriptors that processes hand each other, here threads of one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from stretto.distributed.memory import sharing


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
    with sharing._giving(file_with(""), {1}) as (name, given):
        with pytest.raises(OSError, match=r"it sent nothing|reset|Broken pipe"):
            sharing._take(name, 1, time.monotonic() + 5)
        assert not given.done()


@contextlib.contextmanager
def connected(name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taker:
        taker.settimeout(5)
        taker.connect(sharing._abstract(name))
        yield taker


def says(number, taker):
    taker.send(sharing._NUMBER.pack(number))


def receives(taker):
    _, (descriptor,), _, _ = socket.recv_fds(taker, 64, 1)
    os.close(descriptor)


def hangs_up_at_once(name):
    with connected(name):
        pass


def hangs_up_after_its_number(name):
    with connected(name) as taker:
        says(1, taker)


def hangs_up_with_the_descriptor(name):
    with connected(name) as taker:
        says(1, taker)
        receives(taker)


def says_something_else_at_the_end(name):
    with connected(name) as taker:
        says(1, taker)
        receives(taker)
        taker.send(b"no")


def is_nobody(name):
    with connected(name) as taker:
        says(7, taker)
        assert not taker.recv(64)


def says_no_number(name):
    with connected(name) as taker:
        taker.send(b"what")
        assert not taker.recv(64)


AWAY = [
    hangs_up_at_once,
    hangs_up_after_its_number,
    hangs_up_with_the_descriptor,
    says_something_else_at_the_end,
    is_nobody,
    says_no_number,
]


@pytest.mark.parametrize("goes_away", AWAY)
def test_one_that_goes_away_keeps_nobody_out(goes_away):
    read = with_disturbance(lambda name: [goes_away(name) for _ in range(3)])
    assert read == {0: "of 1", 1: "of 0"}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_one_that_stays_silent_keeps_nobody_waiting(steps):
    with contextlib.ExitStack() as open_until_the_end:

        def stays(name):
            taker = open_until_the_end.enter_context(connected(name))
            if steps:
                says(1, taker)
            if steps == 2:
                receives(taker)

        assert with_disturbance(stays) == {0: "of 1", 1: "of 0"}


def with_disturbance(disturb):
    """What processes 0 and 1 read in each other's descriptor; `disturb(name of 0)` comes first."""
    store, read = Store(), {}

    def share(process):
        options = {"limit_s": 20}
        found = sharing.exchange(
            file_with(f"of {process}"), process, (0, 1), "test", store, **options
        )
        ((_, descriptor),) = found.items()
        read[process] = os.pread(descriptor, 9, 0).decode()
        os.close(descriptor)

    thread = threading.Thread(target=share, args=(0,))
    thread.start()
    disturb(store.look_up("test/0", 5))
    share(1)
    thread.join()
    return read


def test_one_that_takes_and_leaves_at_once_is_counted():
    with sharing._giving(own := file_with(""), missing := {1, 2}) as (name, given):
        for process in (1, 2):
            with connected(name) as taker:
                says(process, taker)
                receives(taker)
                taker.send(sharing._TAKEN)
        given.result(5)
    assert not missing
    os.close(own)


def test_one_that_takes_twice_counts_once():
    with sharing._giving(own := file_with(""), {1, 2}) as (name, given):
        for process in (1, 1, 2):
            os.close(sharing._take(name, process, time.monotonic() + 5))
            if process == 1:
                assert not given.done()
        given.result(5)
    os.close(own)


def test_many_at_once_find_room(monkeypatch):
    name = "of a test of room"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        connected_to_full(server, name),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late,
    ):
        monkeypatch.setattr(time, "sleep", lambda seconds: server.accept()[0].close())
        sharing._connect(late, name, time.monotonic() + 10)
        assert late.getpeername()


@contextlib.contextmanager
def connected_to_full(server, name):
    """The server listens, and has as many connections as it has room for."""
    server.bind(sharing._abstract(name))
    server.listen(0)
    with connected(name), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one_more:
        one_more.setblocking(False)
        with pytest.raises(BlockingIOError):
            one_more.connect(sharing._abstract(name))
        yield


def test_after_a_failure_nothing_is_given():
    store = Store()
    with pytest.raises(OSError, match="process 1 has not shared"):
        sharing.exchange(own := file_with(""), 0, (0, 1), "test", store, limit_s=0.1)
    os.close(own)  # Its number may now be another file's.
    with pytest.raises(ConnectionRefusedError):
        sharing._take(store.look_up("test/0", 1), 1, time.monotonic() + 1)


def test_those_that_did_not_take_are_named_and_theirs_closed():
    store = Store()

    def share(process):
        with sharing._giving(own := file_with(""), {0}) as (name, given):
            store.publish(f"test/{process}", name)
            given.result(5)
            if process == 2:
                os.close(sharing._take(store.look_up("test/0", 5), 2, time.monotonic() + 5))
        os.close(own)

    own, before = file_with(""), len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=share, args=(process,)) for process in (1, 2, 3)]
    for thread in threads:
        thread.start()
    with pytest.raises(OSError, match=r"processes \[1, 3\] have not taken .* of process 0"):
        sharing.exchange(own, 0, (0, 1, 2, 3), "test", store, limit_s=2)
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(own)


def test_a_process_without_room_for_a_file(monkeypatch):
    nothing = b"\0", [], socket.MSG_CTRUNC, None
    with sharing._giving(own := file_with(""), {1}) as (name, _):
        monkeypatch.setattr(socket, "recv_fds", lambda *_: nothing)
        with pytest.raises(OSError, match="this process can open no more files"):
            sharing._take(name, 1, time.monotonic() + 5)
    os.close(own)


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
