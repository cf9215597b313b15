"""Signals to jobs: who gets them, how long processes have then, and what nobody passes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

LOCAL = ("--launcher", "local")
PREAMBLE = "import os, signal, sys, time\nme = int(os.environ['STRETTO_PROCESS_ID'])\n"
BEGUN = "open(f'begun{me}', 'w').write(str(os.getpid()))\n"
SAVE = """
def save(*_):
    time.sleep(3)
    open(f'saved{me}', 'w').close()
    sys.exit(0)
"""


def begun(folder: Path, count: int):
    files = [folder / f"begun{i}" for i in range(count)]
    return lambda: all(file.exists() and file.read_text() for file in files)


@pytest.mark.parametrize(
    ("number", "handled"),
    [
        pytest.param("SIGTERM", "SIGTERM", marks=pytest.mark.slow),
        ("SIGINT", "SIGINT"),
        ("SIGHUP", "SIGTERM"),
    ],
)
def test_a_process_has_time_to_save(start_job, tmp_path, number, handled):
    script = (
        PREAMBLE + SAVE + f"signal.signal(signal.{handled}, save)\n" + BEGUN + "time.sleep(600)"
    )
    job = start_job(script, *LOCAL, "-n", "2")
    job.wait_for(begun(tmp_path, 2))
    job.process.send_signal(signal.Signals[number])
    result = job.result()
    assert result.status == 128 + signal.Signals[number]
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert f"stretto: {number}; the processes have 30 s to end" in result.stderr
    assert result.left == []


DEAF = PREAMBLE + "for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"


def test_the_time_to_save_can_be_set(start_job, tmp_path):
    job = start_job(DEAF + BEGUN + "time.sleep(600)", *LOCAL, "-n", "1", "--grace", "0.5")
    job.wait_for(begun(tmp_path, 1))
    job.process.terminate()
    result = job.result(limit_s=25)
    assert result.status == 143 and result.left == []


def test_a_second_signal_ends_all_at_once(start_job, tmp_path):
    job = start_job(DEAF + BEGUN + "time.sleep(600)", *LOCAL, "-n", "1", "--grace", "50")
    job.wait_for(begun(tmp_path, 1))
    job.process.send_signal(signal.SIGINT)
    assert "the processes have 50 s" in job.process.stderr.readline()
    job.process.send_signal(signal.SIGINT)
    result = job.result(limit_s=25)
    assert result.status == 130 and result.left == []


@pytest.mark.parametrize(
    ("command", "number"), [("trap '' HUP", "SIGHUP"), ("trap '' INT", "SIGINT")]
)
def test_a_signal_that_was_to_be_ignored_is_ignored(start_job, tmp_path, command, number):
    """As under nohup, and in the background of a script."""
    shell = (
        "sh",
        "-c",
        f'{command}; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "stretto.launch",
        "run",
    )
    script = PREAMBLE + BEGUN + "while not os.path.exists('go'): time.sleep(0.02)\nprint('end')"
    job = start_job(script, *LOCAL, "-n", "1", command=shell)
    job.wait_for(begun(tmp_path, 1))
    job.process.send_signal(signal.Signals[number])
    time.sleep(0.5)
    (tmp_path / "go").touch()
    result = job.result()
    assert (result.status, result.stdout) == (0, "[0] end\n")


def test_signals_of_the_scripts_own_are_left_alone(run_job):
    """When another process fails, one is asked where it is, but not by its own signals."""
    script = PREAMBLE + "def mine(number, _): print('got', number, flush=True)\n"
    script += "for n in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(n, mine)\n" + BEGUN
    script += "while not os.path.exists('begun0'): time.sleep(0.02)\n"
    script += "if me == 1: time.sleep(0.3); raise ValueError('boom')\ntime.sleep(600)"
    result = run_job(script, *LOCAL, "-n", "2")
    assert result.status == 1 and result.stdout == ""
    assert "process 0: at " in result.stderr


def test_user_signals_keep_their_default(run_job):
    """A process does not find them ignored."""
    script = PREAMBLE + "print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)"
    assert run_job(script, *LOCAL, "-n", "1").stdout == "[0] True\n"


def test_what_hides_in_a_session_of_its_own_ends_with_the_job(start_job, tmp_path):
    """However the job ends: here its supervisor is killed."""
    script = PREAMBLE + "import subprocess\n"
    script += "subprocess.Popen(['setsid', 'sh', '-c', 'sleep 600 & sleep 600'])\n" + BEGUN
    job = start_job(script + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(begun(tmp_path, 2))
    time.sleep(0.3)
    job.process.kill()
    assert job.result().left == []


def test_a_stopped_agent_is_noticed(start_job, tmp_path):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(begun(tmp_path, 2))
    worker = int((tmp_path / "begun1").read_text())
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGSTOP)
    result = job.result()
    assert result.status == 128 + signal.SIGSTOP
    assert "process 1 of 2" in result.last_line()
    assert "its agent on host" in result.last_line() and "was stopped" in result.last_line()
    assert result.left == []
