"""What users of torchrun, mpirun and srun are used to: -m, stdin, --tee, one job inside another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning.launchers import find_mpirun
from stretto.launch.planning.modules import module_file
from stretto.launch.planning.ranks import parse_ranks

LOCAL = ("--launcher", "local")
STRETTO_RUN = (sys.executable, "-m", "stretto.launch", "run")
PREAMBLE = "import os, sys, time\nme = int(os.environ['STRETTO_PROCESS_ID'])\n"


# --- Modules. -------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise_here = 1")
    (folder / "values.py").write_text("value = 7")
    (folder / "steps.py").write_text(
        "import sys\nfrom .values import value\nprint(value, sys.argv[1:], __package__)\n"
        "if 'fail' in sys.argv: raise KeyError('gone')\n"
    )
    (folder / "__main__.py").write_text("print('all of it')")
    return tmp_path


def test_module_runs_as_under_python(start_job, package):
    command = (*STRETTO_RUN, *LOCAL, "-n", "1", "-m", "trainer.steps", "-n", "--lr=1")
    result = start_job("", command=command).result()
    assert result.status == 0, result.stderr
    script = str(package / "script.py")  # what the fixture adds
    assert result.stdout == f"[0] 7 {['-n', '--lr=1', script]} trainer\n"


def test_working_directory_comes_before_installed_modules(start_job, package):
    (package / "rich.py").write_text("print('my own')")
    result = start_job("", command=(*STRETTO_RUN, *LOCAL, "-n", "1", "-m", "rich")).result()
    assert (result.status, result.stdout) == (0, "[0] my own\n"), result.stderr


def test_failure_of_a_module_begins_in_it(start_job, package):
    command = (*STRETTO_RUN, *LOCAL, "-n", "2", "-m", "trainer.steps", "fail")
    result = start_job("", command=command).result()
    assert result.status == 1
    assert result.last_line() == "KeyError: 'gone'"
    report = result.stderr[result.stderr.index("stretto: process ") :]
    assert "steps.py" in report and "runpy" not in report and "worker.py" not in report


def test_file_of_a_module(package):
    assert module_file("trainer.steps", package) == package / "trainer" / "steps.py"
    assert module_file("trainer", package) == package / "trainer" / "__main__.py"
    assert "trainer" not in sys.modules  # nothing was imported


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module", "there is no module 'no_such_module'"),
        ("trainer.stops", "there is no module 'trainer.stops'"),
        ("trainer.steps.x", "'trainer.steps' is not a package"),
        ("itertools", "no module|no Python source"),
    ],
)
def test_module_that_is_not_there(package, name, words):
    with pytest.raises(LaunchError, match=words):
        module_file(name, package)


# --- Input. ---------------------------------------------------------------------------------------


def piped(start_job, script: str, given: str, *options: str, n: int = 2):
    """A job that reads `given` from a pipe."""
    feed = f"{sys.executable} -c {given!r} | exec {' '.join(STRETTO_RUN)} --launcher local -n {n}"
    job = start_job(script, command=("sh", "-c", f'{feed} "$@"', "sh", *options))
    return job.result()


def test_input_goes_to_the_first_process(start_job):
    script = PREAMBLE + "import zlib\ndata = sys.stdin.buffer.read()\n"
    script += "print(me, len(data), zlib.crc32(data))"
    given = "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 4000)"
    result = piped(start_job, script, given)
    assert result.status == 0, result.stderr
    import zlib

    expected = zlib.crc32(bytes(range(256)) * 4000)
    assert sorted(result.stdout.splitlines()) == [f"[0] 0 1024000 {expected}", "[1] 1 0 0"]


def test_input_that_nobody_reads_holds_nothing_up(start_job):
    given = "print(chr(120) * 10**6)"
    assert piped(start_job, "print('done')", given, n=1).stdout == "[0] done\n"
    result = piped(start_job, "import sys; print(sys.stdin.read())", given, "--stdin", "none", n=1)
    assert (result.status, result.stdout) == (0, "[0] \n")


def test_input_from_a_file_and_line_by_line(start_job, tmp_path):
    (tmp_path / "lines").write_text("a\nb\n")
    script = PREAMBLE + "for line in sys.stdin: print(me, line.strip())"
    shell = f'exec {" ".join(STRETTO_RUN)} --launcher local -n 1 "$@" < lines'
    result = start_job(script, command=("sh", "-c", shell, "sh")).result()
    assert result.stdout == "[0] 0 a\n[0] 0 b\n", result.stderr


# --- Which output is shown. -----------------------------------------------------------------------


def test_output_of_chosen_processes(run_job, tmp_path):
    script = PREAMBLE + "print('hello', me)\nprint('err', me, file=sys.stderr)"
    result = run_job(script, *LOCAL, "-n", "4", "--tee", "0,2-3", "--log-dir", "logs")
    assert sorted(result.stdout.splitlines()) == [f"[{i}] hello {i}" for i in (0, 2, 3)]
    assert sorted(result.stderr.splitlines()) == [f"[{i}] err {i}" for i in (0, 2, 3)]
    (log,) = tmp_path.glob("logs/**/process-1.log")
    assert sorted(log.read_text().splitlines()) == ["err 1", "hello 1"]


def test_failure_of_a_process_that_is_not_shown(run_job):
    script = PREAMBLE + "if me == 1: raise ValueError('boom')\ntime.sleep(60)"
    result = run_job(script, *LOCAL, "-n", "2", "--tee", "none")
    assert result.status == 1
    assert result.stdout == ""
    assert result.last_line() == "ValueError: boom"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("all", None), ("none", set()), ("0", {0}), ("0,2-3", {0, 2, 3})],
)
def test_ranks(text, ranks):
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no process"),
        ("a", "'a' is no process"),
        ("0-9", "names process 9.*0 to 3"),
        ("0,3-2", "'3-2' counts backwards; write 2-3"),
    ],
)
def test_ranks_that_are_none(text, words):
    with pytest.raises(LaunchError, match=words):
        parse_ranks(text, 4)
    assert parse_ranks("0-9", None) == set(range(10))  # as after a restart on fewer hosts


# --- Processes that stay alone, and launchers inside a job. ---------------------------------------


def test_processes_that_never_join_are_told_of(run_job):
    script = "import jax\nprint(jax.device_count())"
    result = run_job(script, *LOCAL, "-n", "3")
    assert result.status == 0
    assert "warning: 3 jobs of one process have run" in result.last_line()
    assert "stretto.initialize()" in result.last_line()


@pytest.mark.parametrize(
    "script",
    [
        "import sys\nprint('no JAX here')\nsys.exit(0)",
        "import jax, stretto.launch\nstretto.launch.initialize()\nprint(jax.device_count())",
    ],
)
def test_no_such_word_for_the_others(run_job, script):
    result = run_job(script, *LOCAL, "-n", "2")
    assert result.status == 0, result.stderr
    assert "warning" not in result.stderr


INNER = """
from stretto.launch import environment
from stretto.launch.process.detection import detect
place = detect(environment.current())
print('inner:', place.launcher, place.process_id, 'of', place.num_processes)
"""
OUTER = """
import os, subprocess, sys
if os.environ['STRETTO_PROCESS_ID'] == '0':
    for _ in range(3):  # On a busy machine mpirun itself fails to start now and then.
        how = dict(capture_output=True, text=True, stdin=subprocess.DEVNULL)
        done = subprocess.run(sys.argv[1:], **how)
        if 'listener thread failed to start' not in done.stdout + done.stderr:
            break
    print(done.stdout + done.stderr)
"""


@pytest.mark.parametrize("n", ["1", "2"])
def test_job_inside_a_job(run_job, tmp_path, n):
    """Each counts for itself: the innermost launcher says who a process is."""
    (tmp_path / "inner.py").write_text(INNER)
    inner = (*STRETTO_RUN, *LOCAL, "-n", "2", str(tmp_path / "inner.py"))
    result = run_job(OUTER, *LOCAL, "-n", n, args=inner)
    assert "[0] inner: stretto 0 of 2" in result.stdout.replace("[0] [0]", "[0]"), result.stdout
    assert "inner: stretto 1 of 2" in result.stdout


@pytest.mark.skipif(find_mpirun() is None, reason="needs an mpirun that works")
@pytest.mark.parametrize("outer", ["local", "mpirun"])
def test_mpirun_inside_a_job(run_job, tmp_path, outer):
    mpirun = find_mpirun()
    assert mpirun is not None
    (tmp_path / "inner.py").write_text(INNER)
    options = ("--bind-to", "none") if mpirun.flavour == "openmpi" else ()
    inner = (mpirun.path, *options, "-n", "2", sys.executable, str(tmp_path / "inner.py"))
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    result = run_job(OUTER, "--launcher", outer, "-n", "1", args=inner, env=env)
    for process_id in (0, 1):
        assert f"inner: {mpirun.flavour} {process_id} of 2" in result.stdout, result.stdout
