"""A process that finished while another waits for it, told from one that has work of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import worker
from stretto.launch.supervision import departures
from stretto.launch.supervision.departures import Departures
from stretto.launch.supervision.member import Member
from stretto.launch.supervision.programs import Program

BOTH = {"text": "jit_f", "digest": "f", "processes": [0, 1]}
PYTHON = "/usr/lib/python3.12"


class Channel:
    """Keeps what was sent."""

    def __init__(self):
        self.sent: list[str] = []

    def send(self, kind, **_):
        self.sent.append(kind)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(departures.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def pair(clock):
    """Process 0, which goes on, and process 1, whose script has ended; both run a program."""
    members = []
    for index in range(2):
        hello = {
            **{"kind": "hello", "token": "", "index": index, "count": 2, "host": "h", "pid": 1},
            **{"versions": {}},
        }
        members.append(Member(Channel(), hello))  # type: ignore[arg-type]
        members[-1].update({"kind": "program", "record": {"program": BOTH}})
    members[1].update({"kind": "finished"})
    members[0].stillness.since = 100.0
    return members


def tell_stacks(member: Member, file: str) -> None:
    lines = [f'  File "{file}", line 5 in f', f'  File "{Path(str(worker.__file__))}", line 4 in m']
    for text in ("Current thread 0x2 (most recent call first):", *lines, "Thread end"):
        member.update({"kind": "stacks", "text": text})


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/env/lib/python3.12/site-packages/jax/_src/array.py", True),
        ("/env/lib/python3.12/site-packages/stretto/distributed/private_jax/store.py", True),
        ("train.py", True),  # jitted functions are called past Python
        (f"{PYTHON}/threading.py", False),  # as for a thread that writes a checkpoint
        ("/env/lib/python3.12/site-packages/tensorstore/x.py", False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_who_stands_still_in_a_program_waits(pair, clock, file, waits):
    found = Departures(pair)
    clock[0] = 104.0
    assert found.stuck() is None
    assert pair[0].channel.sent == ["stacks"]
    tell_stacks(pair[0], file)
    clock[0] = 106.0
    failure = found.stuck()
    assert (failure is not None) == waits
    if failure is not None:
        assert (failure.process_id, failure.status) == (1, 1)
        assert "process 0 waits for it" in failure.how
    assert pair[0].channel.sent == ["stacks"]  # asked once


def test_who_computes_is_left_alone(pair, clock):
    pair[0].stillness.since = None
    clock[0] = 1000.0
    found = Departures(pair)
    assert found.wants_news() and not found.wants_news()
    assert found.stuck() is None


def test_who_runs_nothing_with_it_is_left_alone(pair, clock):
    pair[1].programs[:] = [Program("jit_g", "g", (1, 2))]
    clock[0] = 1000.0
    found = Departures(pair)
    assert not found.wants_news() and found.stuck() is None


@pytest.mark.parametrize("is_of_both", [True, False])
def test_who_has_run_no_program_is_missed_in_those_of_both(pair, clock, is_of_both):
    """It left before the first one, as by an early return."""
    left, gone = pair
    gone.programs.clear()
    if not is_of_both:
        left.programs[:] = [Program("jit_f", "f", (0, 2))]
    found = Departures(pair)
    clock[0] = 104.0
    assert found.wants_news() == is_of_both and found.stuck() is None
    tell_stacks(left, "train.py")
    clock[0] = 106.0
    failure = found.stuck()
    assert (failure is not None) == is_of_both
    if failure is not None:
        assert (failure.process_id, failure.status) == (1, 1)


def test_nobody_has_finished(pair, clock):
    pair[1].finished_at = None
    assert not Departures(pair).wants_news()


JAX = "/env/lib/python3.12/site-packages/jax"


@pytest.fixture
def strangers(pair):
    """The same, before they have run anything together."""
    for member in pair:
        member.programs.clear()
    return pair


@pytest.mark.parametrize(
    ("file", "joins", "waits"),
    [
        (f"{JAX}/_src/distributed.py", True, True),
        (f"{JAX}/_src/xla_bridge.py", True, True),
        (f"{JAX}lib/xla_client.py", True, True),
        (f"{JAX}/_src/xla_bridge.py", False, False),  # alone, it starts a GPU
        (f"{JAX}/_src/array.py", True, False),
        ("train.py", True, False),
    ],
)
def test_who_stands_still_where_all_join_waits(strangers, clock, file, joins, waits):
    if joins:
        strangers[0].update({"kind": "joins", "record": {"joins": True}})
    found = Departures(strangers)
    clock[0] = 104.0
    assert found.wants_news() == joins and found.stuck() is None
    tell_stacks(strangers[0], file)
    clock[0] = 106.0
    failure = found.stuck()
    assert (failure is not None) == waits
    if failure is not None:
        assert (failure.process_id, failure.status) == (1, 1)
        assert "process 0 waits for it where all processes join" in failure.how


@pytest.mark.parametrize("vanishes", [True, False])
def test_who_stands_still_at_its_end_waits_for_one_that_vanished(strangers, clock, vanishes):
    left, gone = strangers
    gone.finished_at = None if vanishes else 100.0
    for member in strangers:
        member.update({"kind": "joins", "record": {"joins": True}})
    gone.update({"kind": "ended", "state": "exited", "number": 0, "age_s": 0.0})
    clock[0] = 110.0
    left.update({"kind": "finished"})
    found = Departures(strangers)
    clock[0] = 114.0
    assert found.stuck() is None
    clock[0] = 116.0
    failure = found.stuck()
    assert (failure is not None) == vanishes
    assert failure is None or "waits for it at its end" in failure.how
