"""SIGTERM to processes that have joined. JAX's notice of preemption is for scripts that ask."""

from __future__ import annotations

import re

import pytest

LOCAL = ("--launcher", "local")
JOIN = """
import os, signal, sys, time
import stretto.launch
process = stretto.launch.initialize()
me = process.process_id
"""


def test_a_process_that_asks_for_no_notice_ends_by_sigterm(run_job):
    script = JOIN + "if me == 1: os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)"
    result = run_job(script, *LOCAL, "-n", "2")
    assert result.status == 143
    assert "process 1 of 2" in result.last_line()
    assert "killed by SIGTERM" in result.last_line()


@pytest.mark.slow
def test_a_handler_from_before_the_job_was_joined_is_called(run_job):
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    script = JOIN + "if me == 1: os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)"
    result = run_job(handler + script, *LOCAL, "-n", "2")
    assert result.status == 7
    assert "process 1 of 2" in result.last_line()


def test_all_that_ask_reach_the_same_step(run_job):
    """Also a process that asks for the first time after another one got the signal."""
    script = JOIN + (
        "from jax.experimental import multihost_utils\n"
        "while me == 0 and not os.path.exists('signalled'): time.sleep(0.02)\n"
        "step = 0\n"
        "while not multihost_utils.reached_preemption_sync_point(step):\n"
        "    if me == 1 and step == 0:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        open('signalled', 'w').close()\n"
        "    step += 1\n"
        "    time.sleep(0.05)\n"
        "print('saves at', step)\n"
    )
    result = run_job(script, *LOCAL, "-n", "2")
    assert result.status == 0
    steps = re.findall(r"saves at (\d+)", result.stdout)
    assert len(steps) == 2 and steps[0] == steps[1]
