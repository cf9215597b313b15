"""Jobs over several hosts, which are network namespaces of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import network_hosts as helper
import pytest

from stretto.distributed.xla_flags import ON_IMPORT
from stretto.launch.planning.launchers import find_mpirun

MPIRUN = find_mpirun()
REASON = "needs an mpirun that works" if MPIRUN is None else helper.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.xdist_group("network_hosts"),
]

PREAMBLE = (
    "import json, os, signal, socket, sys, time\nme = int(os.environ['STRETTO_PROCESS_ID'])\n"
)
BEGUN = "open(f'begun{me}', 'w').write(str(os.getpid()))\n"


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory) -> Iterator[helper.Hosts]:
    with helper.make_hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def start_on(start_job, three_hosts):
    """`start_on(script, *options)`: `stretto run` on the first host; others by the stand-in ssh."""

    def start(script, *options, agent=True, **more):
        reach = three_hosts.reach(MPIRUN) if agent else {}
        env = {"JAX_PLATFORMS": "cpu", **reach, **more.pop("env", {})}
        run = (sys.executable, "-m", "stretto.launch", "run")
        command = three_hosts.command(three_hosts.names[0], *run)
        return start_job(script, *options, command=command, env=env, **more)

    return start


def text_of(path: Path) -> str:
    """What a process has written so far."""
    return path.read_text() if path.exists() else ""


def slots(hosts, *counts: int) -> str:
    return ",".join(f"{name}:{n}" for name, n in zip(hosts.names, counts, strict=False))


def nothing_left(hosts) -> bool:
    """Whether no process remains on any host, mpirun's daemons included."""
    until = time.monotonic() + 15
    while time.monotonic() < until:
        left = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for name in hosts.names
        ]
        if not any(left):
            return True
        time.sleep(0.1)
    return False


def test_place_and_environment(start_on, three_hosts, tmp_path):
    flags = "--a='b c' --d=\"e\"\n f=\t"
    script = PREAMBLE + "print(json.dumps([me, socket.gethostname(), dict(os.environ)]))"
    (tmp_path / "hosts").write_text(
        f"# three\r\n{three_hosts.names[0]} slots=1\r\n\r\n{three_hosts.names[1]}\tslots=2\r\n"
        f"{three_hosts.names[2]} slots=1"
    )
    result = start_on(script, "--hostfile", "hosts", env={"XLA_FLAGS": flags, "O": "1"}).result()
    assert result.status == 0, result.stderr
    told = sorted(json.loads(line[4:]) for line in result.stdout.splitlines())
    a, b, c = three_hosts.names
    assert [(me, host) for me, host, _ in told] == [(0, a), (1, b), (2, b), (3, c)]
    assert [e["STRETTO_LOCAL_PROCESS_ID"] for _, _, e in told] == ["0", "0", "1", "0"]
    assert all(e["XLA_FLAGS"] == " ".join((flags, *ON_IMPORT)) for _, _, e in told)
    assert not any("O" in environ for _, _, environ in told)
    assert nothing_left(three_hosts)


SUM = """
import jax, numpy as np, sys
from jax.sharding import PartitionSpec as P
import stretto.launch

process = stretto.launch.initialize()
n = len(jax.devices())
mesh = jax.make_mesh((n,), ("x",))
data = np.arange(1.0, n + 1)
sharding = jax.NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback((n,), sharding, lambda index: data[index])
total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"),
                              out_specs=P()))(x)
sys.stdout.write(f"{process.process_id} {float(total.addressable_data(0)[0])}\\n")
"""


def test_sum_over_hosts(start_on, three_hosts):
    result = start_on(SUM, "--hosts", slots(three_hosts, 1, 1)).result()
    assert result.status == 0, result.stderr
    words = sorted(line for line in result.stdout.splitlines() if "Gloo" not in line)
    assert words == ["[0] 0 3.0", "[1] 1 3.0"]
    assert nothing_left(three_hosts)


def test_exception_on_another_host(start_on, three_hosts):
    script = PREAMBLE + "if me == 2: raise OSError('disk')\ntime.sleep(600)"
    result = start_on(script, "--hosts", slots(three_hosts, 1, 1, 1)).result()
    assert result.status == 1
    assert result.last_line() == "OSError: disk"
    assert f"process 2 of 3 on {three_hosts.names[2]} failed" in result.stderr
    assert nothing_left(three_hosts)


def test_killed_process_on_another_host(start_on, three_hosts, tmp_path):
    job = start_on(PREAMBLE + BEGUN + "time.sleep(600)", "--hosts", slots(three_hosts, 1, 1))
    job.wait_for(lambda: all(text_of(tmp_path / f"begun{i}") for i in range(2)))
    os.kill(int((tmp_path / "begun1").read_text()), signal.SIGKILL)
    result = job.result()
    assert result.status == 137
    assert f"process 1 of 2 on {three_hosts.names[1]}" in result.last_line()
    assert nothing_left(three_hosts)


def test_cut_network(start_on, three_hosts, tmp_path):
    """Nothing is heard from a host any more: the job ends, and on both sides of the cut."""
    job = start_on(PREAMBLE + BEGUN + "time.sleep(600)", "--hosts", slots(three_hosts, 1, 1, 1))
    job.wait_for(lambda: all((tmp_path / f"begun{i}").exists() for i in range(3)))
    three_hosts.cut(three_hosts.names[2])
    try:
        result = job.result()
        assert result.status == 1
        assert f"process 2 of 3 on {three_hosts.names[2]}" in result.last_line()
        assert f"lost host {three_hosts.names[2]}" in result.last_line()
        until = time.monotonic() + 15
        while not nothing_left(three_hosts):
            assert time.monotonic() < until
    finally:
        three_hosts.mend(three_hosts.names[2])


def refusal(job) -> list[str]:
    result = job.result()
    assert result.status == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()


def test_host_without_a_name(start_on):
    *_, line = refusal(start_on("", "--hosts", "nowhere.invalid:1", "--start-timeout", "1"))
    assert "host nowhere.invalid does not resolve" in line


def test_host_that_does_not_answer(start_on, three_hosts):
    """No ssh server on the second host; on the first, which runs the command, none is needed."""
    options = ("--hosts", slots(three_hosts, 1, 1), "--start-timeout", "2")
    first, line = refusal(start_on("", *options, agent=False))
    assert f"{three_hosts.names[1]} cannot be reached by ssh" in line
    assert "Connection refused" in line and three_hosts.names[0] not in line
    assert f"{three_hosts.names[1]} cannot be reached" in first and "waiting up to 2 s" in first


def test_hosts_that_cannot_reach_the_first(start_on, three_hosts):
    first = three_hosts.names[0]
    three_hosts.run(first, "ip", "link", "add", "far0", "type", "bridge")
    three_hosts.run(first, "ip", "addr", "add", "192.0.2.7/32", "dev", "far0")
    three_hosts.run(first, "ip", "link", "set", "far0", "up")
    options = ("--hosts", slots(three_hosts, 1, 1), "--interface", "far0")
    lines = refusal(start_on("", *options))
    assert f"host {three_hosts.names[1]} cannot reach" in "".join(lines)
    assert "192.0.2.7" in "".join(lines)
    assert nothing_left(three_hosts)


def test_interface_that_is_not_there(start_on, three_hosts):
    options = ("--hosts", slots(three_hosts, 1, 1), "--interface", "eth7")
    (line,) = refusal(start_on("", *options))
    assert "no network address on interface eth7" in line


def test_script_that_another_host_lacks(start_on, three_hosts, tmp_path):
    """The second host sees another folder in this one's place."""
    hidden = three_hosts.agent.with_name("hiding.sh")
    hide = f"mount -t tmpfs none {tmp_path}; $*"
    hidden.write_text(
        three_hosts.agent.read_text()
        .replace("unshare --uts", "unshare --uts --mount")
        .replace("$*", hide)
    )
    hidden.chmod(0o755)
    env = {"PRTE_MCA_plm_ssh_agent": str(hidden), "HYDRA_LAUNCHER_EXEC": str(hidden)}
    (line,) = refusal(start_on("", "--hosts", slots(three_hosts, 1, 1), env=env))
    assert f"script.py does not exist on host {three_hosts.names[1]}" in line


def test_killed_supervisor_leaves_nothing_on_any_host(start_on, three_hosts, tmp_path):
    """No process on any host, mpirun's connections to the others included, and no folder."""
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp")}
    script = PREAMBLE + "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '60'])\n" + BEGUN
    job = start_on(script + "time.sleep(600)", "--hosts", slots(three_hosts, 1, 1), env=env)
    job.wait_for(lambda: all((tmp_path / f"begun{i}").exists() for i in range(2)))
    job.process.kill()
    job.result()
    until = time.monotonic() + 10
    while not nothing_left(three_hosts):
        assert time.monotonic() < until
    assert not list((tmp_path / "tmp").glob("stretto-*"))


@pytest.fixture
def ipv6_hosts(tmp_path):
    with helper.make_hosts(2, tmp_path, ipv6=True) as hosts:
        yield hosts


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs a kernel with IPv6")
def test_hosts_with_ipv6_alone(start_job, ipv6_hosts, tmp_path):
    """Agents come by IPv6, and JAX's coordinator is there; mpirun need not cope with it."""
    one, other = ipv6_hosts.names
    mpirun = tmp_path / "mpirun"
    script = "[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.1' && exit\n"
    script += "while [ $1 != -x ]; do shift; done; shift 4; export PMIX_NAMESPACE=x\n"
    script += "export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
    script += "OMPI_COMM_WORLD_LOCAL_RANK=0\n"
    script += 'OMPI_COMM_WORLD_RANK=0 "$@" &\n'
    script += f"OMPI_COMM_WORLD_RANK=1 ip netns exec {other} unshare --uts sh -c "
    script += f'\'hostname {other}; exec "$@"\' sh "$@" &\nwait\n'
    mpirun.write_text("#!/bin/sh\n" + script)
    mpirun.chmod(0o755)
    code = "import sys; from stretto.launch.planning import launchers\n"
    code += (
        f"launchers.find_mpirun = lambda path: launchers.MpiRun({str(mpirun)!r}, 'openmpi', (5,))\n"
    )
    code += "from stretto.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ipv6_hosts.command(one, sys.executable, "-c", code, "run")
    env = {"JAX_PLATFORMS": "cpu", "PRTE_MCA_plm_ssh_agent": "unused"}
    show = "print(me, os.environ['STRETTO_COORDINATOR'].rpartition(':')[0])"
    options = ("--hosts", f"{one}:1,{other}:1")
    result = start_job(PREAMBLE + show, *options, command=command, env=env).result()
    assert result.status == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line[:6] for line in lines] == ["[0] 0 ", "[1] 1 "]
    assert all("[fd77:" in line and line.endswith("::1]") for line in lines)


LOSES_ONE = (
    PREAMBLE
    + """
attempt = int(os.environ['STRETTO_RESTART'])
print(attempt, socket.gethostname(), os.environ['STRETTO_NUM_PROCESSES'], flush=True)
if attempt == 0:
    open(f'begun{me}', 'w').write('')
    time.sleep(600)
"""
)


@pytest.mark.parametrize(
    ("options", "second"),
    [(("-n", "2"), [0, 2]), (("-n", "3", "--min-devices", "2"), [0, 2])],
    ids=["spare host", "fewer hosts"],
)
def test_restart_without_a_host_that_was_lost(start_on, three_hosts, tmp_path, options, second):
    more = ("--restarts", "1", "--hosts", slots(three_hosts, 1, 1, 1))
    job = start_on(LOSES_ONE, *options, *more)
    job.wait_for(lambda: all((tmp_path / f"begun{i}").exists() for i in range(2)))
    three_hosts.cut(three_hosts.names[1])
    try:
        result = job.result()
    finally:
        three_hosts.mend(three_hosts.names[1])
    assert result.status == 0, result.stderr
    assert f"lost host {three_hosts.names[1]}" in result.stderr
    told = sorted(line[4:] for line in result.stdout.splitlines() if line[4] == "1")
    assert told == [f"1 {three_hosts.names[i]} 2" for i in second]
    assert nothing_left(three_hosts)
