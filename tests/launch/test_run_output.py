"""Output of jobs whose reader or disk is slow, gone or full, and lines that take their time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.launch.supervision import wire
from stretto.launch.supervision.console import Console

LOCAL = ("--launcher", "local")
PREAMBLE = "import os, sys, time\nme = os.environ['STRETTO_PROCESS_ID']\n"
MUCH = PREAMBLE + "for i in range(30_000): print(f'{i:099}')\nopen('end' + me, 'w')\n"
PAUSE_S = wire.SILENCE_LIMIT_S + 2


def numbers(stdout: str) -> list[list[int]]:
    """Of each of two processes, the numbers it printed."""
    lines = [line.split("] ") for line in stdout.splitlines()]
    return [[int(text) for name, text in lines if name == f"[{i}"] for i in range(2)]


def test_a_reader_that_pauses_holds_the_job_up_and_loses_nothing(start_job):
    """Longer than an unconfirmed message may take: nothing of it fills the connections."""
    job = start_job(MUCH, *LOCAL, "-n", "2")
    assert os.read(job.process.stdout.fileno(), 1) == b"["
    time.sleep(PAUSE_S)
    result = job.result()
    assert result.status == 0, result.stderr
    assert numbers("[" + result.stdout) == [list(range(30_000))] * 2


def test_a_supervisor_that_is_stopped_for_a_while_goes_on(start_job, tmp_path):
    """As by Ctrl-Z, while processes write more than all buffers on the way take."""
    wait = "print('begun')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    job = start_job(PREAMBLE + wait + MUCH.removeprefix(PREAMBLE), *LOCAL, "-n", "2")
    assert {job.process.stdout.readline() for _ in range(2)} == {"[0] begun\n", "[1] begun\n"}
    job.process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    time.sleep(PAUSE_S)
    job.process.send_signal(signal.SIGCONT)
    result = job.result()
    assert result.status == 0, result.stderr
    assert numbers(result.stdout) == [list(range(30_000))] * 2


@pytest.mark.parametrize("how", ["signal", "timeout"])
def test_a_reader_that_never_reads_does_not_keep_the_job_from_ending(start_job, tmp_path, how):
    options = ("--timeout", "6") if how == "timeout" else ()
    job = start_job(MUCH + "open('end' + me, 'w')", *LOCAL, "-n", "1", *options)
    assert os.read(job.process.stdout.fileno(), 1) == b"["
    if how == "signal":
        time.sleep(0.5)
        job.process.terminate()
    assert job.process.wait(40) == (124 if how == "timeout" else 143)
    assert not (tmp_path / "end0").exists()
    words = job.process.stderr.read()
    assert ("time limit of 6 s" if how == "timeout" else "all 1 processes are ended") in words


def test_a_progress_bar_and_a_question_are_seen_at_once(start_job, tmp_path):
    """They have no newline; each waits until it was seen."""
    script = PREAMBLE + "def wait(name):\n  while not os.path.exists(name): time.sleep(0.02)\n"
    script += "print('\\rstep 1/2', end='', flush=True)\nwait('seen1')\n"
    script += "print('\\rstep 2/2', end='', flush=True)\nwait('seen2')\nprint()"
    job = start_job(script, *LOCAL, "-n", "1")
    shown = b""
    for step in (1, 2):
        while f"step {step}/2".encode() not in shown:
            shown += os.read(job.process.stdout.fileno(), 1 << 16)
        (tmp_path / f"seen{step}").touch()
    assert job.result().status == 0
    assert shown.endswith(b"\r[0] step 2/2")


def test_a_line_of_a_megabyte_is_one_line(run_job):
    script = "import os\nos.write(1, b'a' * 1_000_000 + b'\\n')"
    assert run_job(script, *LOCAL, "-n", "1").stdout == f"[0] {'a' * 1_000_000}\n"


def test_log_folder_that_cannot_be_written(start_job, tmp_path):
    (tmp_path / "file").touch()
    result = start_job("print('no')", *LOCAL, "-n", "1", "--log-dir", "file/logs").result()
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert "--log-dir file/logs cannot be written (Not a directory)" in line


def test_a_full_disk_does_not_end_the_job(tmp_path, capfd):
    """The message comes once; the terminal has everything."""
    (tmp_path / "process-0.log").symlink_to("/dev/full")
    console = Console(2, tmp_path)
    for process_id in (0, 1):
        console.output(process_id, "stdout", b"first\n")
    assert console.drain(5)
    console.output(0, "stdout", b"second\n")
    assert console.drain(5)
    console.close()
    captured = capfd.readouterr()
    assert captured.out == "[0] first\n[1] first\n[0] second\n"
    (line,) = captured.err.splitlines()
    assert "process-0.log cannot be written (No space left on device)" in line
    assert (tmp_path / "process-1.log").read_text() == "first\n"


def test_output_that_goes_to_a_full_disk_is_said_to_be_lost(capfd):
    """Once, on stderr."""
    console, saved = Console(1, None), os.dup(1)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, 1)
        for word in (b"first\n", b"second\n"):
            console.output(0, "stdout", word)
            assert console.drain(5)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(full)
        console.close()
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert "stdout cannot be written (No space left on device); the job continues" in line
    assert not captured.out


def test_each_run_has_a_folder_of_its_own(run_job, tmp_path):
    for word in ("one", "two"):
        run_job(f"print({word!r})", *LOCAL, "-n", "1", "--log-dir", "logs")
    folders = [path for path in (tmp_path / "logs").iterdir() if not path.is_symlink()]
    assert sorted((path / "process-0.log").read_text() for path in folders) == ["one\n", "two\n"]
    assert (tmp_path / "logs/latest/process-0.log").read_text() == "two\n"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, closed):
    (tmp_path / "s.py").write_text("print('x')\nopen('done', 'w').write('done')")
    run = f"{sys.executable} -m stretto.launch run --launcher local -n 1 s.py {closed}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(["sh", "-c", run], cwd=tmp_path, env=environ, timeout=60)
    assert result.returncode == 0
    assert Path(tmp_path, "done").read_text() == "done"


def test_the_numbers_of_closed_streams_are_taken(tmp_path):
    """Else the next file to be opened gets what is meant for the terminal."""
    code = "import os, sys\nfrom stretto.launch import cli\ncli.main(['--version'])\n"
    code += "places = [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]\n"
    code += "open('places', 'w').write(' '.join(places) + f' {sys.stdout is None}')"
    run = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(run, cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "places").read_text() == "/dev/null /dev/null /dev/null False"
