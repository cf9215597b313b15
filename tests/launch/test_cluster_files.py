"""Cluster files, Slurm's lists of hosts, and the choice between all ways to name hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import cli
from stretto.launch.errors import LaunchError
from stretto.launch.planning import hosts, network
from stretto.launch.planning.cluster import load_cluster
from stretto.launch.planning.gpus import Gpu
from stretto.launch.planning.options import RunOptions
from stretto.launch.planning.slurm import devices_per_host, expand_nodelist

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "cluster").glob("*.toml"))
GPUS = tuple(Gpu(i, "H100", f"GPU-{i}") for i in range(4))
FULL = """
hosts = ["a", "b:2"]
devices_per_host = 4
interface = "ib0"
[environment]
NCCL_SOCKET_IFNAME = "ib0"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path):
    assert load_cluster(path).hosts


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts = [", "Invalid"),
        ("hosts = ['a']", "missing required field `devices_per_host`"),
        ("hosts = []\ndevices_per_host = 1", "hosts is empty"),
        ("hosts = ['a']\ndevices_per_host = 0", "must be at least 1"),
        ("hosts = ['a']\ndevices_per_host = 'x'", r"Expected `int`, got `str` - at `\$.devices"),
        ("hosts = ['a']\ndevices_per_host = 1\ngpus = 4", "unknown field `gpus`"),
    ],
)
def test_errors_name_file_and_field(tmp_path, text, words):
    with pytest.raises(LaunchError, match=words) as caught:
        load_cluster(write(tmp_path, text))
    assert "cluster.toml" in str(caught.value)


def test_missing_file():
    with pytest.raises(LaunchError, match=r"--cluster none\.toml: No such file"):
        load_cluster(Path("none.toml"))


def test_job_of_a_cluster(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    Path("s.py").write_text("")
    write(tmp_path, FULL + "\n")
    assert cli.main(["run", "--cluster", "cluster.toml", "-n5", "--dry-run", "s.py"]) == 0
    shown = capfd.readouterr().out
    assert "process 0 on a: GPU 0, 1, 2, 3" in shown
    assert "process 1 on b: GPU 0\n" in shown
    assert "NCCL_SOCKET_IFNAME='ib0'" in shown


def test_image(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("")
    write(tmp_path, 'image = "stretto.sif"\n' + FULL)
    assert cli.main(["run", "--cluster", "cluster.toml", "--dry-run", "s.py"]) == 0
    assert "apptainer exec --nv stretto.sif python3 -P -m stretto" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[03-05,9],login", ["gpu03", "gpu04", "gpu05", "gpu9", "login"]),
        ("r[1-2]n[8-9]", ["r1n8", "r2n8", "r1n9", "r2n9"]),
        ("rack[1-2]-ib", ["rack1-ib", "rack2-ib"]),
        ("", []),
    ],
)
def test_nodelist(text, names):
    assert sorted(expand_nodelist(text)) == sorted(names)


@pytest.mark.parametrize(
    ("environ", "count"),
    [({"SLURM_GPUS_ON_NODE": "4"}, 4), ({"SLURM_GPUS_PER_NODE": "h100:8"}, 8), ({}, None)],
)
def test_slurm_gpus(environ, count):
    assert devices_per_host(environ) == count


def chosen(environ=None, visible=(), **options):
    result = hosts.choose_hosts(RunOptions(script="s.py", **options), None, environ or {}, visible)
    return [(host.name, host.num_devices) for host in result.hosts], result.platform


def test_allocation():
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    assert chosen(environ) == ([("n1", 4), ("n2", 4)], "gpu")
    assert chosen(environ, num_devices=4) == ([("n1", 4)], "gpu")
    assert chosen({"SLURM_JOB_NODELIST": "n1,n2"}) == ([("n1", 1), ("n2", 1)], "cpu")


def test_this_machine_is_localhost():
    me = network.host_name()
    assert chosen({"SLURM_JOB_NODELIST": me}, GPUS) == ([("localhost", 4)], "gpu")
    assert chosen(hosts=f"{me}:2") == ([("localhost", 2)], "cpu")
    assert chosen(visible=GPUS, num_devices=2) == ([("localhost", 2)], "gpu")


def test_named_hosts_come_before_the_allocation():
    assert chosen({"SLURM_JOB_NODELIST": "n1,n2"}, GPUS, hosts="a,b:2") == (
        [("a", 4), ("b", 2)],
        "gpu",
    )
