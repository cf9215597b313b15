"""Processes that mpirun or srun ends, hosts that fall silent, and processes that stay alone."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from stretto.launch.planning.job import Job
from stretto.launch.planning.launchers import AgentCommand, agent_program
from stretto.launch.planning.layout import HostDevices, plan
from stretto.launch.supervision import supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.wire import Channel


def job(tmp_path: Path, script: str, launcher: str) -> Job:
    """A job of one process, whose agent is started by a shell script as `"$@"`."""
    path = tmp_path / "script.py"
    path.write_text(script)
    argv = ("sh", "-c", launcher, "sh", *agent_program())
    layout = plan([HostDevices("localhost", 1)], "cpu", None)
    return Job(layout, (str(path),), str(tmp_path), {}, (AgentCommand(argv),))


SLEEPS = "import time\nopen('begun', 'w')\ntime.sleep(60)\n"
BEGUN = "while [ ! -e begun ]; do sleep 0.05; done; "


@pytest.mark.parametrize(
    ("launcher", "status", "words"),
    [
        (
            f'"$@" & {BEGUN} kill $!; sleep 0.5; echo CANCELLED DUE TO TIME LIMIT',
            143,
            "with SIGTERM",
        ),
        (
            f'"$@" & {BEGUN} kill -9 $!; sleep 0.5; echo CANCELLED; sleep 1',
            1,
            "its launcher ended it",
        ),
    ],
)
def test_launcher_that_ends_a_process_says_why(
    tmp_path, capfd, monkeypatch, launcher, status, words
):
    """As srun at a time limit: it is the launcher's doing, in its words, and not want of memory."""
    monkeypatch.chdir(tmp_path)
    console = Console(1, None)
    assert supervisor.run(job(tmp_path, SLEEPS, launcher), console) == status
    console.close()
    said = capfd.readouterr().err
    assert words in said
    assert "out of memory" not in said
    assert "The launcher's last lines:\n  CANCELLED" in said


def test_script_that_ends_itself_is_not_ended_by_the_launcher(tmp_path, capfd):
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    console = Console(1, None)
    assert supervisor.run(job(tmp_path, script, 'exec "$@"'), console) == 143
    console.close()
    said = capfd.readouterr().err
    assert "killed by SIGTERM" in said
    assert "mpirun or srun" not in said


@pytest.mark.parametrize("limit_s", [2, 6, 45])
def test_network_that_may_be_silent_for_longer(limit_s):
    """The kernel's own limits of a connection, in its units, add up to what was asked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
    channel = Channel(sock)
    channel.limit_silence(limit_s)

    def option(name: str) -> int:
        return sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

    assert option("TCP_USER_TIMEOUT") == 1000 * limit_s
    probes = option("TCP_KEEPINTVL") * option("TCP_KEEPCNT")
    assert abs(option("TCP_KEEPIDLE") + probes - limit_s) <= max(1, limit_s / 6)
    channel.close()


def test_agents_and_supervisor_get_the_limit(tmp_path, capfd, monkeypatch):
    limits = []
    monkeypatch.setattr(Channel, "limit_silence", lambda _, limit_s: limits.append(limit_s))
    sent = []
    send = Channel.send
    monkeypatch.setattr(
        Channel,
        "send",
        lambda self, kind, **more: (sent.append((kind, more)), send(self, kind, **more)),
    )
    work = job(tmp_path, "", 'exec "$@"')
    console = Console(1, None)
    assert supervisor.run(work, console) == 0
    console.close()
    assert limits == [6.0]
    told = [more["silence_limit_s"] for kind, more in sent if kind == "prepare"]
    assert told == [6.0]
    assert json.dumps(told)  # it travels
