"""Processes that gloo connects meet before their first collective, as long as that may take."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import pxla
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stretto.distributed.private_jax import first_runs
from stretto.distributed.private_jax import store as jax_store
from stretto.distributed.private_jax.first_runs import Meetings

BOTH = ("x", "y")


def on_mesh(body):
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False)
    )


def groups(body) -> list[str]:
    x = jax.ShapeDtypeStruct((64, 8), np.float32)
    return first_runs.groups_in(on_mesh(body).lower(x).compile().as_text())


def test_groups_are_those_of_the_collectives():
    along_x, along_y = groups(lambda x: lax.psum(x, "x")), groups(lambda x: lax.psum(x, "y"))
    assert len(along_x) == len(along_y) == 1 and along_x != along_y
    assert groups(lambda x: lax.all_gather(x, "y", tiled=True)[:8]) == along_y
    assert groups(lambda x: lax.all_to_all(x, "y", 0, 0, tiled=True)) == along_y
    assert groups(lambda x: lax.psum_scatter(x, "y", tiled=True)) == along_y
    assert groups(lambda x: lax.ppermute(x, "x", [(0, 1)])) == ["{{0,4},{1,5},{2,6},{3,7}}"]
    assert len(groups(lambda x: lax.psum(lax.pmax(x, BOTH), "x"))) == 2
    assert groups(lambda x: lax.pmax(lax.psum(x, "x"), "x")) == along_x
    assert groups(lambda x: x + lax.axis_index("x")) == []


@pytest.fixture
def met(monkeypatch):
    """What is met for, in order; programs run on one process, and are taken for two's."""
    order: list = []
    monkeypatch.setattr(pxla, "ExecuteReplicated", pxla.ExecuteReplicated)
    monkeypatch.setattr(first_runs, "_groups", lambda program: ([0, 1], ["one", "two"]))
    assert first_runs.watch(lambda processes, group: order.append((*processes, group)))
    return order


def test_they_meet_before_the_first_run_and_not_again(met):
    program = on_mesh(lambda x: lax.psum(x, "x"))
    x = np.ones((64, 8), np.float32)
    compiled = program.lower(x).compile()
    assert met == []
    for _ in range(3):
        np.testing.assert_array_equal(compiled(x), 2 * x)
    assert met == [(0, 1, "one"), (0, 1, "two")]
    on_mesh(lambda x: lax.pmax(x, "x"))(x)
    assert len(met) == 4


def test_a_program_of_one_process_has_nobody_to_meet(monkeypatch):
    monkeypatch.setattr(pxla, "ExecuteReplicated", pxla.ExecuteReplicated)
    assert first_runs.watch(lambda *_: pytest.fail("met"))
    on_mesh(lambda x: lax.psum(2 * x, "x"))(np.ones((64, 8), np.float32))


def test_a_jax_without_that_class(monkeypatch):
    monkeypatch.delattr(pxla, "ExecuteReplicated")
    assert not first_runs.wait_before_first_collectives()


class Store:
    """What the coordinator is for a job; each look-up comes before `then`'s next call."""

    def __init__(self, monkeypatch, then=()):
        self.values, self.looks, self._then = {}, 0, iter(then)
        monkeypatch.setattr(jax_store, "publish", self.publish)
        monkeypatch.setattr(jax_store, "look_up", self.look_up)

    def publish(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def look_up(self, key, limit_s):
        self.looks += 1
        if key not in self.values:
            next(self._then, lambda key: None)(key)
            raise OSError("nothing came")
        return self.values[key]


def test_they_are_waited_for(monkeypatch):
    store = Store(monkeypatch)
    store._then = iter([lambda key: None] * 5 + [lambda key: store.publish(key, "1")])
    meetings = Meetings()
    meetings.meet((0, 1), "group")
    assert store.looks == 1 + 6 + 1 and len(store.values) == 2
    meetings.meet((0, 1), "group")
    assert store.looks == 8


def test_one_that_does_not_come_is_named_and_may_come_later(monkeypatch):
    store = Store(monkeypatch)
    monkeypatch.setenv("STRETTO_START_LIMIT_S", "1e-9")
    meetings = Meetings()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"process 1 has not .* STRETTO_START_LIMIT_S"):
            meetings.meet((0, 1), "group")
    (own,) = store.values
    store.publish(own.removesuffix("/0") + "/1", "1")
    meetings.meet((0, 1), "group")


def test_groups_do_not_wait_for_each_other(monkeypatch):
    """Threads of two processes may come to them in different orders."""
    store, begun = Store(monkeypatch), threading.Event()
    meetings = Meetings()

    def until_the_other_has_met(key):
        begun.set()
        assert done.wait(10)
        store.publish(key, "1")

    done = threading.Event()
    store._then = iter([until_the_other_has_met])
    first = threading.Thread(target=meetings.meet, args=((0, 1), "one"))
    first.start()
    assert begun.wait(10)
    store._then = iter([lambda key: store.publish(key, "1")])
    meetings.meet((0, 1), "two")
    done.set()
    first.join()


LATE = """
import sys, time
import jax, numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import stretto as st

late_s = float(sys.argv[1])
process = st.initialize().process_id
mesh = Mesh(np.array(jax.devices()), ("x",))
body = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
program = jax.jit(body)
x = jax.make_array_from_callback((2,), jax.NamedSharding(mesh, P("x")), lambda i: np.ones(1))
if process == 1:
    time.sleep(late_s)
print(program(x))
"""


def run_late(tmp_path: Path, seconds: float, *options: str) -> subprocess.CompletedProcess:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = [sys.executable, "-m", "stretto.launch", "run", "-n", "2", *options, str(script)]
    return subprocess.run(
        [*command, str(seconds)], capture_output=True, text=True, timeout=280, check=False
    )


def test_a_process_that_comes_too_late_is_named(tmp_path):
    done = run_late(tmp_path, 600, "--env", "STRETTO_START_LIMIT_S=0.5")
    assert done.returncode != 0
    assert "TimeoutError: process 1 has not come to its first collective" in done.stderr


@pytest.mark.slow
def test_a_process_may_come_later_than_gloo_waits(tmp_path):
    done = run_late(tmp_path, 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.]") == 2
