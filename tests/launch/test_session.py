"""Agents and launchers that misbehave, and strangers that connect."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from stretto.launch import worker
from stretto.launch.commands import run as run_command
from stretto.launch.errors import LaunchError
from stretto.launch.planning.job import Job
from stretto.launch.planning.launchers import AgentCommand, agent_program
from stretto.launch.planning.layout import HostDevices, plan
from stretto.launch.planning.options import RunOptions
from stretto.launch.supervision import agent, launching, start, supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.member import Member
from stretto.launch.supervision.session import Session

AGENT = agent_program()


def shell(text: str, index: int = 0) -> AgentCommand:
    """A shell script that starts an agent as `"$@"`."""
    return AgentCommand(("sh", "-c", text, "sh", *AGENT), {"STRETTO_AGENT_INDEX": str(index)})


def job(tmp_path: Path, script: str, *commands: AgentCommand, **more) -> Job:
    path = tmp_path / "script.py"
    path.write_text(script)
    layout = plan([HostDevices("localhost", len(commands))], "cpu", None)
    return Job(layout, (str(path),), str(tmp_path), {}, commands, **more)


def run(work: Job) -> int:
    return supervisor.run(work, Console(len(work.commands), None))


def test_launcher_that_hangs_at_the_end_is_killed(tmp_path, capfd):
    """As mpirun does when a network breaks: it stays, and ignores SIGTERM."""
    pid_file = tmp_path / "pid"
    stays = shell(f"trap '' TERM; echo $$ > {pid_file}; \"$@\"; sleep 600 & wait; sleep 600")
    work = job(tmp_path, "", stays)
    assert run(work) == 0
    pid = int(pid_file.read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_launcher_that_is_killed_takes_its_job_along(tmp_path, capfd):
    """As by `kill -9` on mpirun, which leaves its processes behind."""
    begun = tmp_path / "begun"
    launcher = shell(f'"$@" & until [ -e {begun} ]; do sleep 0.1; done; kill -9 $$')
    script = f"import time; open({str(begun)!r}, 'w'); time.sleep(600)"
    work = job(tmp_path, script, launcher)
    with pytest.raises(LaunchError, match="mpirun or srun was ended"):
        run(work)


@pytest.fixture
def run_all(monkeypatch):
    """`run_all(work, restarts)`: all attempts at a job, as the command makes them."""

    def run(work: Job, restarts: int) -> int:
        monkeypatch.setattr(run_command, "make_job", lambda *_: (work, ""))
        return run_command._run(RunOptions("script.py", restarts=restarts), {})

    return run


def test_restart_that_cannot_start_is_a_failed_attempt(run_all, tmp_path, capfd):
    """As where a host is gone: every attempt is made, and the last error is the job's."""
    counts = f'echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -gt 1 ] && exit; "$@"'
    work = job(tmp_path, "import sys; sys.exit(7)", shell(counts), start_timeout_s=5)
    with pytest.raises(LaunchError, match="only 0 of 1 processes could be started"):
        run_all(work, 3)
    assert (tmp_path / "tries").read_text() == "x\n" * 4
    words = capfd.readouterr().err
    assert words.count("only 0 of 1 processes") == 2 and "restart 3 of 3" in words


def test_job_that_never_ran_is_not_tried_again(run_all, tmp_path, capfd):
    work = job(tmp_path, "", shell(f"echo x >> {tmp_path}/tries"))
    with pytest.raises(LaunchError, match="only 0 of 1 processes could be started"):
        run_all(work, 3)
    assert (tmp_path / "tries").read_text() == "x\n"


def test_agent_that_never_comes(tmp_path, capfd):
    work = job(tmp_path, "", shell("sleep 60"), start_timeout_s=0.5)
    with pytest.raises(LaunchError, match=r"0 of 1 processes started within 0\.5 s"):
        run(work)


def test_two_agents_that_both_think_they_are_alone(tmp_path):
    """What an mpirun of another kind than its library makes of a job."""
    work = job(tmp_path, "", shell('"$@"', 0), shell('"$@"', 0))
    with pytest.raises(LaunchError, match=r"numbered its 2 processes \[0, 0\]"):
        run(work)


def test_programs_that_the_system_does_not_start(tmp_path, monkeypatch):
    """As by `ulimit -u`; those that were started before are ended."""
    started = []

    def start(*arguments, **options):
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(subprocess_popen(*arguments, **options))
        return started[-1]

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(launching.subprocess, "Popen", start)
    work = job(tmp_path, "", shell('"$@"', 0), shell('"$@"', 1))
    with pytest.raises(LaunchError, match=r"1 of 2 programs could be started, .*; see ulimit -a"):
        run(work)
    assert started[0].poll() is not None


def test_a_port_that_is_taken_on_the_first_host(tmp_path):
    (tmp_path / "s.py").touch()
    told = []

    class Channel:
        def limit_silence(self, _):
            pass

        def send(self, kind, **fields):
            told.append((kind, fields))

    with socket.create_server(("", 0)) as taken:
        wants = {"cwd": str(tmp_path), "script": "s.py", "devices": [], "needs_host_name": False}
        wants |= {"offer_port": True, "port": taken.getsockname()[1], "silence_limit_s": 6}
        agent.Agent(Channel(), {})._prepare(wants | {"interface": None})  # type: ignore[arg-type]
    ((kind, fields),) = told
    assert (
        kind == "prepared" and "cannot be listened on (Address already in use)" in fields["problem"]
    )


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_strangers_are_dropped(tmp_path, capfd):
    work = job(tmp_path, "print('fine')", shell('sleep 1; "$@"'))
    with Session(work, Console(1, None)) as session:
        session.start()
        listener = next(
            key.fileobj
            for key in session._selector.get_map().values()
            if isinstance(key.fileobj, socket.socket) and key.fileobj.family == socket.AF_INET
        )
        strangers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(framed(b'{"kind": "hello", "token": "guess"'))
        strangers[2].sendall(framed(b'{"kind": "hello", "token": "guess"}'))
        start.begin(session)
        assert len(session.members) == 1
        for stranger in strangers:
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
            stranger.close()
        session.stop()


class _Silent:
    """A channel that goes nowhere."""

    def send(self, kind, **fields):
        pass


def member(index: int, **versions: str) -> Member:
    hello = {
        **{"kind": "hello", "token": "", "index": index, "count": 2, "host": f"h{index}"},
        **{"pid": 1, "versions": versions},
    }
    return Member(_Silent(), hello)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"python": "3.12.1", "jax": "0.11.3"}, "jax is 0.11.2 on host h0 and 0.11.3 on host h1"),
        ({"python": "3.12.1"}, "jax is 0.11.2 on host h0 and nothing on host h1"),
    ],
)
def test_hosts_with_different_versions(other, words):
    first = member(0, python="3.12.1", jax="0.11.2")
    with pytest.raises(LaunchError, match=words):
        start._check_versions([first, member(1, **other)])
    start._check_versions([first, member(1, python="3.12.1", jax="0.11.2")])


def test_failure_of_a_process_that_was_told_to_end_is_none():
    one = member(0)
    one.send("stop", grace_s=1)
    assert one.update({"kind": "ended", "state": "killed", "number": 15, "age_s": 0.0}) is None
    assert one.over


def test_failure_is_told_once():
    one = member(0)
    record = {"status": 1, "traceback": "t"}
    failure = one.update({"kind": "failure", "record": record})
    assert failure is not None and failure.traceback == "t"
    assert one.update({"kind": "ended", "state": "exited", "number": 1, "age_s": 0.0}) is None


def test_worker_needs_the_standard_library_only():
    """Whatever a script imports is its own: the worker brings nothing of ours."""
    source = Path(worker.__file__)
    assert "stretto.launch" not in source.read_text().split('"""', 2)[2]
