"""Which hosts a job gets and on what platform: asked for, said by hosts, Slurm's, spare ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import choice, gpus, network
from stretto.launch.planning.cluster import Cluster
from stretto.launch.planning.layout import HostDevices, take_devices
from stretto.launch.planning.options import RunOptions
from stretto.launch.planning.platforms import asked_platform, check_explicit

GPUS = tuple(gpus.Gpu(i, "H100", f"GPU-{i}") for i in range(4))


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(choice.slurm, "_scontrol", lambda *_: None)


@pytest.fixture
def here(monkeypatch):
    """`here(n)`: this machine has n GPUs."""

    def have(n: int) -> None:
        listing = gpus.Listing(GPUS[:n])
        monkeypatch.setattr(gpus, "list_gpus", lambda: listing)

    have(0)
    return have


def chosen(environ=None, there=None, lost=(), cluster=(None, None), **options):
    """(hosts and devices, platform); `there` says how many GPUs each host has."""

    def survey(hosts):
        assert there is not None, "nobody should have asked"
        return {host: there[host] for host in hosts}

    options = RunOptions(script="s.py", cluster=cluster[0], **options)
    result = choice.choose_hosts(options, cluster[1], environ or {}, survey, lost)
    return [(host.name, host.num_devices) for host in result.hosts], result.platform


# --- The platform. --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "of_cluster", "variable", "platform"),
    [
        (None, None, None, None),
        ("cpu", "gpu", "cuda", "cpu"),
        ("cuda", None, "cpu", "gpu"),
        (None, "gpu", "cpu", "gpu"),
        (None, None, "cuda,cpu", "gpu"),
        (None, None, "GPU", "gpu"),
        (None, None, "cpu", "cpu"),
    ],
)
def test_what_was_asked_for(option, of_cluster, variable, platform):
    environ = {"JAX_PLATFORMS": variable} if variable else {}
    assert asked_platform(option, of_cluster, environ) == platform


def test_platforms_that_are_not_ours():
    with pytest.raises(LaunchError, match="JAX_PLATFORMS=tpu names neither"):
        asked_platform(None, None, {"JAX_PLATFORMS": "tpu"})
    with pytest.raises(LaunchError, match="--env JAX_PLATFORMS=cpu has no cuda in it"):
        check_explicit("gpu", {"JAX_PLATFORMS": "cpu"})
    check_explicit("gpu", {"JAX_PLATFORMS": "cuda"})
    check_explicit("cpu", {"JAX_PLATFORMS": "cpu"})
    check_explicit("cpu", {})
    with pytest.raises(LaunchError, match="--env JAX_PLATFORMS=cuda is not cpu"):
        check_explicit("cpu", {"JAX_PLATFORMS": "cuda"})
    with pytest.raises(LaunchError, match=r"\[environment\] JAX_PLATFORMS=cpu has no cuda"):
        check_explicit("gpu", {"JAX_PLATFORMS": "cpu"}, "[environment]")


def test_login_node_without_gpus_asks_its_hosts(here):
    there = {"node1": 8, "node2": 8}
    planned = [("node1", 8), ("node2", 8)]
    assert chosen(there=there, hosts="node1:8,node2:8") == (planned, "gpu")
    assert chosen(there=there, hosts="node1,node2") == (planned, "gpu")
    environ = {"JAX_PLATFORMS": "cuda,cpu"}
    assert chosen(environ, hosts="node1:8,node2:8") == (planned, "gpu")  # agents will look
    assert chosen(hosts="node1:8,node2:8", platform="cpu") == (planned, "cpu")
    assert chosen(there={"a": 0, "b": 0}, hosts="a,b:2") == ([("a", 1), ("b", 2)], "cpu")


@pytest.mark.parametrize(
    ("there", "options", "words"),
    [
        ({"a": 8, "b": 0}, {}, "no NVIDIA GPU that a job can use on b"),
        ({"a": 8, "b": 4}, {}, "host b has 4 GPUs that a job can use, and not 8"),
        ({"a": 0, "b": 0}, {"platform": "cuda", "hosts": "a,b"}, "no NVIDIA GPU .* on a, b"),
    ],
)
def test_hosts_that_are_not_as_they_were_named(here, there, options, words):
    with pytest.raises(LaunchError, match=words):
        chosen(there=there, **{"hosts": "a:8,b:8", **options})


def test_this_machine(here):
    me = network.host_name()
    assert chosen() == ([("localhost", 1)], "cpu")
    for environ, options in (({}, {"platform": "cuda"}), ({"JAX_PLATFORMS": "cuda,cpu"}, {})):
        with pytest.raises(LaunchError, match=r"no NVIDIA GPU .*asks for them.*--platform cpu"):
            chosen(environ, num_devices=2, **options)
    here(4)
    assert chosen(num_devices=2) == ([("localhost", 2)], "gpu")
    assert chosen({"JAX_PLATFORMS": "cpu"}, platform="cuda") == ([("localhost", 4)], "gpu")
    assert chosen(num_devices=9, platform="cpu") == ([("localhost", 9)], "cpu")
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES= hides all GPUs"):
        chosen({"CUDA_VISIBLE_DEVICES": ""}, platform="cuda")
    assert chosen({"SLURM_JOB_NODELIST": me}) == ([("localhost", 4)], "gpu")
    assert chosen(hosts=f"{me}:2", platform="cpu") == ([("localhost", 2)], "cpu")


def test_why_is_said_where_nobody_asked(here):
    def why(**options):
        options = RunOptions(script="s.py", **options)
        return choice.choose_hosts(options, None, {}, lambda hosts: {"a": 0}).why

    assert "this machine has no NVIDIA GPU" in why()
    assert why(hosts="a") == "no NVIDIA GPU on a"
    assert why(hosts="a", platform="cpu") == why(platform="cpu") == ""
    here(2)
    assert why() == "this machine has 2 (H100)"


def test_cluster_file_says_it_all(here):
    cluster = Cluster(hosts=("a", "b:2"), devices_per_host=4)
    file = Path("cluster.toml")
    assert chosen(cluster=(file, cluster)) == ([("a", 4), ("b", 2)], "gpu")
    assert chosen(cluster=(file, cluster), platform="cpu") == ([("a", 4), ("b", 2)], "cpu")


# --- Slurm's allocation. --------------------------------------------------------------------------


def test_allocation(here):
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    even, uneven, none = {"n1": 4, "n2": 4}, {"n1": 4, "n2": 2}, {"n1": 0, "n2": 0}
    assert chosen(environ, even) == ([("n1", 4), ("n2", 4)], "gpu")
    assert chosen(environ, uneven) == ([("n1", 4), ("n2", 2)], "gpu")
    assert chosen(environ, even, num_devices=4) == ([("n1", 4)], "gpu")
    assert chosen(environ, none) == ([("n1", 1), ("n2", 1)], "cpu")
    assert chosen(environ, hosts="n2:1", platform="cpu") == ([("n2", 1)], "cpu")


def test_tasks_of_an_allocation_are_cpu_devices(here):
    environ = {
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
        "JAX_PLATFORMS": "cpu",
    }
    assert chosen(environ) == ([("n1", 4), ("n2", 4), ("n3", 3)], "cpu")
    me = network.host_name()
    alone = {**environ, "SLURM_JOB_NODELIST": me, "SLURM_TASKS_PER_NODE": "4"}
    assert chosen(alone) == ([("localhost", 4)], "cpu")


def test_slurm_gave_gpus_that_are_not_there(here):
    """As with a gres.conf without files: no /dev/nvidia*, and the job would run on the CPU."""
    environ = {"SLURM_JOB_NODELIST": network.host_name(), "SLURM_GPUS_ON_NODE": "8"}
    with pytest.raises(LaunchError, match=r"no NVIDIA GPU .*Slurm gave this job 8"):
        chosen(environ)


def test_short_and_full_name_are_one_host(here, monkeypatch):
    for own, given in (("node1.cluster.local", "node1"), ("node1", "node1.cluster.local")):
        monkeypatch.setattr(network, "host_name", lambda own=own: own)
        assert chosen({"SLURM_JOB_NODELIST": given}, num_devices=2) == ([("localhost", 2)], "cpu")
        assert chosen(hosts=f"{given}:2", platform="cpu") == ([("localhost", 2)], "cpu")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("node1", "node1", True),
        ("node1", "NODE1.cluster.local", True),
        ("node1.cluster.local.", "node1", True),
        ("node1.a", "node1.b", False),
        ("node1", "node10", False),
        ("node1.a", "node1.a.b", False),
        ("", "node1", False),
    ],
)
def test_names_of_one_host(one, other, same):
    assert network.same_host(one, other) == network.same_host(other, one) == same


# --- Spare hosts. ---------------------------------------------------------------------------------

THREE = [HostDevices(name, 4) for name in "abc"]


@pytest.mark.parametrize(
    ("n", "least", "lost", "used"),
    [
        (8, None, (), "a:4 b:4"),
        (8, None, ("b",), "a:4 c:4"),  # c was spare
        (8, None, ("a", "b"), "c:4 a:4"),  # too few are left: a lost one is tried again
        (8, 4, ("a", "b"), "c:4"),
        (None, None, ("b",), "a:4 c:4 b:4"),
        (None, 8, ("b",), "a:4 c:4"),
        (None, 8, ("a", "b"), "c:4 a:4 b:4"),
        (6, None, ("a",), "b:4 c:2"),
    ],
)
def test_hosts_of_an_attempt(n, least, lost, used):
    found = take_devices(n, least, THREE, lost)
    assert " ".join(f"{host.name}:{host.num_devices}" for host in found) == used


def test_fewest_devices_that_cannot_be():
    for least in (0, 9):
        with pytest.raises(LaunchError, match=f"--min-devices {least} must be from 1 to the 8"):
            take_devices(8, least, THREE, ())


def test_lost_hosts_are_not_asked_for_their_gpus(here):
    there = {"a": 4, "c": 4}
    assert chosen(there=there, lost={"b"}, hosts="a,b,c", num_devices=8) == (
        [("a", 4), ("c", 4)],
        "gpu",
    )
