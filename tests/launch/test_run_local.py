"""Jobs on one machine, their agents started directly: what scripts get, and how jobs end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import stretto.launch
from stretto.distributed.xla_flags import ON_IMPORT

LOCAL = ("--launcher", "local")
PREAMBLE = "import json, os, signal, sys, time\nme = int(os.environ['STRETTO_PROCESS_ID'])\n"
# Writes a file named after the process once it has begun, so that a test may strike then.
BEGUN = "open(f'begun{me}', 'w').write(str(os.getpid()))\n"


def after(*process_ids: int) -> str:
    """A line that waits until other processes have begun, however slow the machine is."""
    files = [f"begun{i}" for i in process_ids]
    return f"while not all(map(os.path.exists, {files})): time.sleep(0.02)\n"


def has_begun(folder: Path, *process_ids: int):
    return lambda: all((folder / f"begun{i}").exists() for i in process_ids)


def pid_of(folder: Path, process_id: int) -> int:
    path = folder / f"begun{process_id}"
    while not path.read_text():
        time.sleep(0.01)
    return int(path.read_text())


# --- What a script gets. --------------------------------------------------------------------------


def test_that_gloo_has_connected_is_in_the_log_files_only(run_job, tmp_path):
    gloo = (
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    )
    script = f"print({gloo!r})\nprint('[Gloo] failed')"
    result = run_job(script, *LOCAL, "-n", "1", "--log-dir", "logs")
    assert result.stdout == "[0] [Gloo] failed\n"
    assert (tmp_path / "logs/latest" / "process-0.log").read_text() == f"{gloo}\n[Gloo] failed\n"


def test_arguments_and_place(run_job):
    show = "print(json.dumps([me, sys.argv[1:], sorted(k for k in os.environ if 'STRETTO' in k)]))"
    result = run_job(PREAMBLE + show, *LOCAL, "-n", "3", args=("--x", "-n", "9", "a b", ""))
    assert result.status == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    for i, line in enumerate(lines):
        me, arguments, names = json.loads(line[4:])
        assert me == i
        assert arguments == ["--x", "-n", "9", "a b", ""]
        assert "STRETTO_RENDEZVOUS" not in names


def test_environment_is_an_allow_list_byte_for_byte(run_job):
    flags = "--a='b c' --d=\"e\"\n --f=\xe4\udcff\t"
    show = "print(json.dumps(dict(os.environ)))"
    env = {"XLA_FLAGS": flags, "JAX_FOO": "=x=", "NCCL_DEBUG": "", "OTHER": "o", "THIRD": "3"}
    result = run_job(
        PREAMBLE + show,
        *LOCAL,
        "-n",
        "2",
        "--env",
        "A=",
        "--env=B=1=\n2",
        "--env",
        "THIRD",
        env=env,
    )
    assert result.status == 0, result.stderr
    for line in result.stdout.splitlines():
        got = json.loads(line[4:])
        assert got["XLA_FLAGS"] == " ".join((flags, *ON_IMPORT))
        assert (got["JAX_FOO"], got["NCCL_DEBUG"]) == ("=x=", "")
        assert (got["A"], got["B"], got["THIRD"]) == ("", "1=\n2", "3")
        assert "OTHER" not in got
        assert got["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ((), ["1", "1"]),
        (("--processes-per", "node"), ["2"]),
        (("--env", "JAX_NUM_CPU_DEVICES=5"), ["5", "5"]),
    ],
)
def test_number_of_cpu_devices_is_the_layouts(run_job, options, counts):
    show = "print(os.environ['JAX_NUM_CPU_DEVICES'], os.environ['JAX_PLATFORMS'])"
    env = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    result = run_job(PREAMBLE + show, *LOCAL, "-n", "2", *options, env=env)
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"[{i}] {count} cpu" for i, count in enumerate(counts)]


def test_script_imports_its_neighbours_and_not_the_working_directory(run_job, tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 7")
    result = run_job("import neighbour; print(neighbour.value)", *LOCAL, "-n", "1")
    assert result.stdout == "[0] 7\n", result.stderr


def test_output_goes_to_its_stream_and_to_a_log_file(run_job, tmp_path):
    script = PREAMBLE + "print('out', me)\nprint('err', me, file=sys.stderr)\n"
    script += r"sys.stdout.buffer.write(b'\xff no newline')"
    result = run_job(script, *LOCAL, "-n", "1", "--log-dir", "logs")
    assert result.status == 0
    assert "[0] out 0\n" in result.stdout
    assert result.stderr == "[0] err 0\n"
    log = (tmp_path / "logs/latest" / "process-0.log").read_bytes()
    assert sorted(log.splitlines()) == [b"err 0", b"out 0", b"\xff no newline"]


# --- How jobs end. --------------------------------------------------------------------------------


def test_exception_ends_the_job_and_is_shown_last(run_job):
    fail = "def deep():\n    raise ValueError('boom')\nif me == 1:\n    deep()\ntime.sleep(600)\n"
    result = run_job(PREAMBLE + fail, *LOCAL, "-n", "3")
    assert result.status == 1
    assert result.last_line() == "ValueError: boom"
    report = result.stderr[result.stderr.index("stretto: process 1 of 3 on ") :]
    assert "line 4, in deep" in report
    assert "runpy" not in report


@pytest.mark.parametrize(
    ("fail", "status", "phrase"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(5)", 5, "exit status 5"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("print('last words', file=sys.stderr); os.abort()", 134, "last words"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
        ("import missing_module", 1, "No module named 'missing_module'"),
    ],
)
def test_status_is_that_of_the_first_failure(run_job, fail, status, phrase):
    result = run_job(PREAMBLE + f"if me == 1: {fail}\ntime.sleep(600)", *LOCAL, "-n", "2")
    assert result.status == status
    report = result.stderr[result.stderr.index("stretto: process 1 of 2 on ") :]
    assert phrase in report


def test_syntax_error_is_the_scripts_own(run_job):
    result = run_job("x = (\n", *LOCAL, "-n", "1")
    assert result.status == 1
    assert result.last_line().startswith("SyntaxError: '(' was never closed")
    assert "script.py" in result.stderr and "runpy" not in result.stderr


def test_process_that_ignores_sigterm_is_killed(run_job):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += BEGUN + f"if me == 0:\n    {after(1)}    sys.exit(4)\ntime.sleep(600)"
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "2")
    assert result.status == 4


def test_what_a_process_started_ends_with_it(run_job):
    script = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nsys.exit(me)"
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "2")
    assert result.status == 1


def test_time_limit_shows_where_each_process_is(run_job):
    script = "def wait():\n    time.sleep(600)  # waits\nif me == 1:\n    time.sleep(601)\nwait()"
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "3", "--timeout", "4")
    assert result.status == 124
    lines = result.stderr.rstrip().splitlines()
    assert "time limit of 4 s" in lines[-3]
    assert "process 1: at " in lines[-2] and lines[-2].endswith(":6: time.sleep(601)")
    assert "processes 0, 2: at " in lines[-1] and "time.sleep(600)  # waits" in lines[-1]


def test_failure_shows_where_the_others_are(run_job):
    """Progress that scripts note, and the line they are at; the cause stays the last thing."""
    script = "import stretto.launch\nstretto.launch.progress(3 + me, 'gather' * (me != 1))\n"
    script += f"if me == 1:\n    {after(0, 2)}    raise ValueError('boom')\n"
    script += f"{BEGUN.rstrip()}; time.sleep(600)"  # one line: wherever it is, it is there
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "3")
    assert result.status == 1
    report = result.stderr[result.stderr.index("stretto: when process 1 failed") :].splitlines()
    assert report[1].startswith("  process 0: at step 3 in gather, at ")
    assert report[1].endswith("; time.sleep(600)")
    assert report[2].startswith("  process 2: at step 5 in gather, at ")
    assert " s at step 4: exit status 1" in report[3]
    assert report[-1] == "ValueError: boom"


def test_progress_outside_of_a_job_and_in_a_child_process(run_job):
    script = "import stretto.launch, subprocess\nstretto.launch.progress(1)\n"
    script += "code = 'import stretto.launch as l; l.progress(9, \"child\")'\n"
    script += "subprocess.run([sys.executable, '-c', code], check=True)\nsys.exit(2)"
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "1")
    assert " s at step 1: exit status 2" in result.last_line()
    stretto.launch.progress(1, "nothing happens here")


def test_stopped_process_fails_the_job(start_job, tmp_path):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(has_begun(tmp_path, 0, 1))
    os.kill(pid_of(tmp_path, 1), signal.SIGSTOP)
    result = job.result()
    assert result.status == 128 + signal.SIGSTOP
    assert "process 1 of 2" in result.last_line()
    assert "stopped by SIGSTOP" in result.last_line()
    assert result.left == []


def test_stopped_and_continued_process_goes_on(start_job, tmp_path):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(2)", *LOCAL, "-n", "1")
    job.wait_for(has_begun(tmp_path, 0))
    os.kill(pid_of(tmp_path, 0), signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pid_of(tmp_path, 0), signal.SIGCONT)
    assert job.result().status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all(start_job, tmp_path, number):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(has_begun(tmp_path, 0, 1))
    job.process.send_signal(number)
    result = job.result()
    assert result.status == 128 + number
    assert result.last_line() == "stretto: interrupted; all 2 processes are ended"
    assert result.left == []


def test_killed_supervisor_leaves_nothing(start_job, tmp_path):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(has_begun(tmp_path, 0, 1))
    job.process.kill()
    assert job.result().left == []


def test_killed_agent_is_reported_and_its_worker_dies(start_job, tmp_path):
    job = start_job(PREAMBLE + BEGUN + "time.sleep(600)", *LOCAL, "-n", "2")
    job.wait_for(has_begun(tmp_path, 0, 1))
    worker = pid_of(tmp_path, 1)
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    result = job.result()
    assert result.status == 1
    assert "process 1 of 2" in result.last_line()
    assert "its agent" in result.last_line()
    assert result.left == []


def test_closed_output_ends_the_job(start_job, tmp_path):
    job = start_job(PREAMBLE + "while True: print('x' * 9000)", *LOCAL, "-n", "1")
    assert job.process.stdout is not None
    job.process.stdout.read(4)
    job.process.stdout.close()
    job.process.wait(20)
    assert job.process.returncode == 128 + signal.SIGPIPE


def test_restart_goes_on(run_job, tmp_path):
    script = "attempt = int(os.environ['STRETTO_RESTART'])\nprint('attempt', attempt)\n"
    script += "if attempt < 2: sys.exit(7)"
    result = run_job(PREAMBLE + script, *LOCAL, "-n", "1", "--restarts", "2", "--log-dir", "logs")
    assert result.status == 0
    assert result.stdout == "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n"
    assert "restart 2 of 2" in result.stderr
    assert (tmp_path / "logs/latest" / "process-0.restart2.log").read_text() == "attempt 2\n"


def test_restarts_run_out(run_job):
    result = run_job("import sys; sys.exit(7)", *LOCAL, "-n", "1", "--restarts", "1")
    assert result.status == 7
    assert result.stderr.count("exit status 7") == 2
