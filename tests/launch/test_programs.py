"""Processes that run different programs, or the same with other shapes (B34)."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from stretto.launch.supervision import programs
from stretto.launch.supervision.causes import exited, killed
from stretto.launch.supervision.programs import Comparison, Program, find_mismatch, hints
from stretto.launch.supervision.stillness import Look, Stillness, look


def told(*names: str, group: tuple[int, ...] = (0, 1)) -> list[Program]:
    return [Program(f"jit_{name} (4xf32)", name, group) for name in names]


class TestComparing:
    def test_the_same_so_far(self):
        assert find_mismatch([told("f", "g"), told("f")]) is None
        assert find_mismatch([[], []]) is None
        assert find_mismatch([]) is None

    def test_each_has_what_the_other_lacks(self):
        found = find_mismatch([told("f", "g", "x"), told("f", "h", "y")])
        assert found is not None and (found.process_id, found.other_id) == (1, 0)
        assert found.summary == (
            "compiled another program than process 0, of those that processes 0, 1 run together"
        )
        assert found.details == "  process 0: jit_g (4xf32)\n  process 1: jit_h (4xf32)"

    def test_one_that_is_ahead_is_not_another(self):
        """It may have compiled some for itself, in another order, or twice."""
        assert find_mismatch([told("x", "f", "f", "g"), told("g", "f")]) is None

    def test_the_odd_one_out_is_named(self):
        everyone = (0, 1, 2)
        found = find_mismatch([told(name, group=everyone) for name in "gff"])
        assert found is not None and (found.process_id, found.other_id) == (0, 1)

    def test_groups_of_processes_are_compared_among_themselves(self):
        both, one, other = told("all", group=(0, 1, 2, 3)), told("f"), told("g", group=(2, 3))
        assert find_mismatch([one + both, both + one, other + both, other + both]) is None

    def test_what_only_the_inside_tells_apart(self):
        same = [Program("jit_f (4xf32)", digest, (0, 1)) for digest in "ab"]
        found = find_mismatch([[same[0]], [same[1]]])
        assert found is not None
        assert found.details.endswith("They differ in the collectives or kernels inside.")


def still() -> Stillness:
    """Of a process that has stood still since long ago."""
    stillness = Stillness(spins=False)
    stillness.since = 1.0
    return stillness


@dataclasses.dataclass
class Member:
    programs: list[Program]
    heard_at: float = 0.0
    stillness: Stillness = dataclasses.field(default_factory=still)


class TestSilence:
    """Processes that differ have failed once nothing is heard of them."""

    @pytest.fixture
    def clock(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(programs.time, "monotonic", lambda: now[0])
        return now

    def test_it_is_looked_at_and_then_given_up(self, clock):
        members = [Member(told("f"), 100), Member(told("g"), 98)]
        comparison = Comparison(members)
        assert comparison.wants_news() and not comparison.wants_news()
        clock[0] = 104.5
        assert comparison.wants_news()
        assert comparison.stuck() is None
        clock[0] = 105.5
        failure = comparison.stuck()
        assert failure is not None and (failure.process_id, failure.status) == (1, 1)
        assert failure.traceback.endswith("process 1: jit_g (4xf32)")

    def test_who_is_heard_of_goes_on(self, clock):
        members = [Member(told("f"), 100), Member(told("g"), 98)]
        comparison = Comparison(members)
        members[0].heard_at = 104.6
        clock[0] = 109.0
        assert comparison.stuck() is None
        clock[0] = 110.0
        assert comparison.stuck() is not None

    @pytest.mark.parametrize("since", [None, 108.0])
    def test_who_does_not_stand_still_goes_on(self, clock, since):
        """It computes, as a compiler does, or sleeps, or has done so until a moment ago."""
        members = [Member(told("f"), 100), Member(told("g"), 98)]
        members[1].stillness.since = since
        clock[0] = 112.0
        assert Comparison(members).stuck() is None

    def test_a_difference_that_goes_away(self, clock):
        """Where processes compile the same in another order."""
        members = [Member(told("f")), Member(told("g"))]
        comparison = Comparison(members)
        assert comparison.wants_news()
        members[0].programs += told("g")
        clock[0] = 101
        assert comparison.stuck() is None

    def test_no_difference_is_never_stuck(self, clock):
        comparison = Comparison([Member(told("f")), Member([])])
        clock[0] = 1000
        assert not comparison.wants_news() and comparison.stuck() is None


class TestStillness:
    """Looks one second apart, at a CPU process unless it spins."""

    def seen(self, *looks: Look, spins: bool = False) -> float | None:
        stillness = Stillness(spins=spins)
        for second, one in enumerate(looks):
            stillness.add(one, float(second))
        return stillness.since

    def test_it_waits_and_computes_nothing(self):
        assert self.seen(*[Look(3.0, waits=True, runs=False)] * 3) == 1.0

    def test_it_waits_while_other_threads_compile(self):
        assert self.seen(*(Look(0.5 * i, waits=True, runs=False) for i in range(3))) is None

    def test_it_is_in_a_system_call_such_as_sleep(self):
        assert self.seen(*[Look(3.0, waits=False, runs=False)] * 3) is None

    def test_it_may_spin_on_gpus(self):
        looks = [Look(float(i), waits=False, runs=True) for i in range(3)]
        assert self.seen(*looks) is None
        assert self.seen(*looks, spins=True) == 0.0

    def test_one_that_cannot_be_looked_at_counts_as_still(self):
        stillness = Stillness(spins=False)
        stillness.add(None, 7.0)
        assert stillness.since == 7.0


class TestHints:
    def test_none(self):
        assert hints([told("f"), told("f")]) == ""
        assert hints([[], []]) == ""

    def test_a_mismatch(self):
        assert hints([told("f"), told("g")]).startswith("Before that, process 1 compiled another")

    def test_a_program_that_others_did_not_compile(self):
        everyone = (0, 1, 2)
        some = [
            told("f", group=everyone),
            told("f", "g", group=everyone),
            told("f", group=everyone),
        ]
        assert hints(some) == (
            "Of the programs that processes 0, 1, 2 run together, process 1 compiled one that"
            " processes 0, 2 did not:\n  jit_g (4xf32)"
        )

    def test_where_they_are_given(self):
        assert killed(0, 6, 0.0).is_runtimes_own
        crash = dataclasses.replace(exited(0, 1, 0.0), traceback="x\njax.errors.JaxRuntimeError: y")
        assert crash.is_runtimes_own
        assert not dataclasses.replace(crash, traceback="x\nKeyError: 'z'\n").is_runtimes_own

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
    def test_none_of_a_process_that_was_ended_from_outside(self, number):
        """It did not compile what the others went on to because it had ended."""
        assert not killed(0, number, 0.0).is_runtimes_own

    def test_none_of_a_script_that_ended_itself(self):
        assert not exited(0, 3, 0.0, "").is_runtimes_own
        assert exited(0, 3, 0.0).is_runtimes_own  # by whom is not known

    def test_notes_below_the_error_do_not_hide_whose_it_is(self):
        """As JAX adds one to an error that is raised while it dispatches."""
        text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        note = "--------------------\nFor simplicity, JAX has removed its internal frames.\n"
        ours = text + "ValueError: jax.errors.JaxRuntimeError was expected\n" + note
        theirs = text + "jax.errors.JaxRuntimeError: INTERNAL: gloo\nsecond line\n" + note
        assert dataclasses.replace(exited(0, 1, 0.0), traceback=theirs).is_runtimes_own
        assert not dataclasses.replace(exited(0, 1, 0.0), traceback=ours).is_runtimes_own


SCRIPT = """
import sys, time
import jax, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
import stretto.launch

me = stretto.launch.initialize().process_id
mesh = jax.make_mesh((2,), ("x",))
spread = jax.NamedSharding(mesh, P("x"))

def rows(count):
    data = np.ones((2 * count, 64), np.float32)
    return jax.make_array_from_callback(data.shape, spread, lambda index: data[index])

def over_both(call):
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"),
                                 check_vma=False))

add = over_both(lambda a: lax.psum(a, "x"))
join = over_both(lambda a: lax.all_gather(a, "x", tiled=True))

def value(x):
    return float(x.addressable_data(0)[0, 0])

value(add(rows(8)))
"""
LOCAL = ("--launcher", "local", "-n", "2")


def test_another_program_ends_the_job(run_job):
    """Long before any limit; the report ends with both programs."""
    script = SCRIPT + "value(join(rows(8)) if me else add(rows(4)))"
    result = run_job(script, *LOCAL, "--timeout", "85")
    assert result.status == 1
    *_, summary, first, second = result.stderr.rstrip().splitlines()
    assert "process 1 of 2" in summary and "compiled another program than process 0" in summary
    assert first.startswith("  process 0: jit") and "(8x64xf32)" in first
    assert second.startswith("  process 1: jit") and "(16x64xf32)" in second


def test_other_shapes_end_the_job(run_job):
    """One process has the program already: gloo notices, and the report says whose is new."""
    script = SCRIPT + "value(add(rows(9 if me else 8)))"
    result = run_job(script, *LOCAL, "--timeout", "85")
    assert result.status not in (0, 124)
    *_, summary, program = result.stderr.rstrip().splitlines()
    assert summary.endswith("process 1 compiled one that process 0 did not:")
    assert "(18x64xf32)" in program


def test_a_process_that_leaves_early_is_named(run_job):
    """The other waits for it in a collective, until JAX gives up minutes later."""
    script = SCRIPT + "if me: sys.exit(0)\nvalue(add(rows(8)))"
    result = run_job(script, *LOCAL, "--timeout", "85")
    assert result.status == 1
    last = result.last_line()
    assert "process 1 of 2" in last
    assert "its script ended with status 0, though process 0 waits for it" in last
    assert "process 0: at " in result.stderr


@pytest.mark.parametrize(
    "end",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("os._exit(3)", "os.abort()")),
        "os._exit(0)",
    ],
)
def test_who_ends_is_named_and_not_who_notices(run_job, end):
    """The other's connection closes before the end is seen."""
    script = "import os\n" + SCRIPT + f"for step in range(400):\n    if step == 9 and me: {end}\n"
    result = run_job(script + "    value(add(rows(8)))", *LOCAL, "--timeout", "85")
    assert result.status == {"os._exit(3)": 3, "os.abort()": 134, "os._exit(0)": 1}[end]
    assert "stretto: process 1 of 2" in result.stderr
    assert "stretto: process 0 of 2" not in result.stderr


class TestALook:
    """At real processes of this machine."""

    @pytest.mark.parametrize(
        ("does", "waits", "computes"),
        [
            ("threading.Lock().acquire", True, False),
            ("time.sleep", False, False),
            ("sum", None, True),
        ],
    )
    def test_what_a_process_does(self, does, waits, computes):
        code = "import itertools, threading, time\nlock = threading.Lock(); lock.acquire()\n"
        call = {"time.sleep": "time.sleep(60)", "sum": "sum(itertools.count())"}
        code += "print(flush=True)\n" + call.get(does, "lock.acquire()")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                if look(process.pid) is None:
                    pytest.skip("this machine does not show system calls")
                first = self._look_until(
                    process, lambda seen: seen.runs == computes and waits in (None, seen.waits)
                )
                if computes:
                    self._look_until(process, lambda seen: seen.cpu_s > first.cpu_s)
                else:
                    time.sleep(0.3)
                    second = look(process.pid)
                    assert second is not None and second.cpu_s == first.cpu_s
            finally:
                process.kill()

    @staticmethod
    def _look_until(process, seen: Callable[[Look], bool]) -> Look:
        """What the first look saw that is as expected; a loaded machine takes its time."""
        until = time.monotonic() + 60
        while (found := look(process.pid)) is None or not seen(found):
            assert time.monotonic() < until, found
            time.sleep(0.02)
        return found
