"""Slurm as it is: its lists of hosts, what each node has, and the srun that starts a job."""

from __future__ import annotations

import os
import re

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import launchers, slurm
from stretto.launch.planning.layout import HostDevices, plan
from stretto.launch.planning.slurm import allocated_hosts, expand_nodelist, gpus_per_host
from stretto.launch.planning.srun import srun_commands

AGENT = launchers.agent_program()
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"}
JOB = """JobId=7 JobName=x
   NodeList=n[1-3]
   JOB_GRES=gpu:7
     Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=gpu:h100:4(IDX:0-3)
     Nodes=n[2-3] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:1(IDX:0),gpu:h100:2(IDX:2,5),shard:3
   MinCPUsNode=1
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """`tool(name, text)`: a program that writes `text`, first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name: str, text: str, status: int = 0) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\nexit {status}\n")
        path.chmod(0o755)

    make("scontrol", "", 1)
    return make


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("gpu[03-05,9],login", "gpu03 gpu04 gpu05 gpu9 login"),
        ("alpha,beta[001,003],gamma", "alpha beta001 beta003 gamma"),
        ("rack[0-1]_blade[0-1]", "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1"),
        ("a[1-2]b[3,5]c", "a1b3c a1b5c a2b3c a2b5c"),
        ("host-[001-002]", "host-001 host-002"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101].x", "n098.x n099.x n100.x n101.x"),
        ("", ""),
    ],
)
def test_nodelist_in_slurms_order(text, names):
    assert expand_nodelist(text) == names.split()


@pytest.mark.parametrize("text", ["n[a-b]", "n[1-", "n[]", "n[1,,2]"])
def test_list_that_is_none(tool, text):
    with pytest.raises(LaunchError, match=re.escape(f"{text!r} is not a list of hosts")):
        allocated_hosts({"SLURM_JOB_NODELIST": text})


def test_scontrol_expands_lists_where_it_is_there(tool):
    tool("scontrol", "x1\nx0")
    assert allocated_hosts({"SLURM_JOB_NODELIST": "x[1,0]"}) == ["x1", "x0"]


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "gpu:h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "h100:4(S:0-1)"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:2"}, 4),
        ({}, None),
    ],
)
def test_gpus_of_this_node(environ, count):
    assert gpus_per_host(environ) == count


def test_gpus_of_uneven_nodes(tool):
    """The variables tell of the node they are read on; scontrol of each."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    assert slurm.gpus_of_hosts(environ, ["n1", "n2"]) == {"n1": 4, "n2": 4}
    tool("scontrol", JOB)
    assert slurm.gpus_of_hosts(environ, ["n1", "n2", "n3"]) == {"n1": 4, "n2": 3, "n3": 3}
    tool("scontrol", "JobId=7\n     Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=")
    assert slurm.gpus_of_hosts({"SLURM_JOB_ID": "7"}, ["n1", "n2"]) is None


def commands(hosts, environ=None, **more):
    layout = plan([HostDevices(*host) for host in hosts], "gpu", "gpu")
    return srun_commands(layout, AGENT, {**ALLOCATION, **(environ or {})}, **more)


def command(hosts, environ=None, **more):
    (only,) = commands(hosts, environ, **more)
    return only.argv


def test_srun_of_even_hosts_in_slurms_order(tool):
    argv = command([("a", 2), ("c", 2)])
    assert {"--nodes=2", "--ntasks=4", "--nodelist=a,c", "--ntasks-per-node=2"} <= set(argv)
    assert "--overlap" not in argv


@pytest.mark.parametrize("hosts", [[("a", 2), ("b", 1)], [("b", 2), ("a", 2)]])
def test_srun_of_any_other_hosts_is_one_a_host(tool, hosts):
    first, second = commands(hosts)
    for step, (name, count) in zip((first, second), hosts, strict=True):
        assert {"--nodes=1", f"--ntasks={count}", f"--nodelist={name}"} <= set(step.argv)
    numbers = [step.environ["STRETTO_AGENT_FIRST"] for step in (first, second)]
    assert numbers == ["0", "2"]


def test_hosts_outside_of_the_allocation(tool):
    assert "--nodelist=b" in command([("b.cluster.org", 1)])
    with pytest.raises(LaunchError, match="host z is not of this Slurm allocation, which has a, b"):
        commands([("a", 1), ("z", 1)])


def test_this_node_of_several(tool):
    assert "--nodelist=b" in command([("localhost", 1)], {"SLURMD_NODENAME": "b"})


@pytest.mark.parametrize(
    ("version", "overlaps"), [("slurm 22.05.8", True), ("slurm 20.02.7", False), ("?", True)]
)
def test_step_inside_a_step_shares_what_that_holds(tool, version, overlaps):
    tool("srun", version)
    environ = {"SLURM_STEP_ID": "0", "PATH": os.environ["PATH"]}
    assert ("--overlap" in command([("a", 1)], environ)) == overlaps


def test_arguments_of_the_users_own_come_last(tool):
    argv = command([("a", 1)], extra=["--mem=0"])
    assert argv[argv.index("--mem=0") + 1 :] == AGENT
