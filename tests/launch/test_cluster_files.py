"""Cluster files."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import cli
from stretto.launch.errors import LaunchError
from stretto.launch.planning.cluster import load_cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "cluster").glob("*.toml"))
FULL = """
hosts = ["a", "b:2"]
devices_per_host = 4
interface = "ib0"
[environment]
NCCL_SOCKET_IFNAME = "ib0"
"""
LEAST = "hosts = ['a']\ndevices_per_host = 1\n"


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
        (
            "hosts = ['a']\ndevices_per_host = 1\ngpus = 4",
            "unknown field `gpus`; there are host",
        ),
        ("hosts = ['a']\ndevices = 1", "unknown field `devices`; did you mean devices_per_host"),
        ("hosts = ['a']", "`devices_per_host`; write devices_per_host = 8"),
        ("devices_per_host = 1", r"`hosts`; write hosts = \["),
        (f"{LEAST}platform = 'cuda'", '\'cuda\' - at .*platform.; it must be "gpu" or "cpu"'),
        (f"{LEAST}processes_per = 'host'", 'it must be "node", "gpu" or a number'),
        (f"{LEAST}[environment]\nSTRETTO_PLATFORM = 'cuda'", "is the launcher's own variable"),
        (f"{LEAST}[environment]\n'A=B' = ''", "'A=B' is no name of a variable"),
        (f"{LEAST}[environment]\n'' = 'x'", "'' is no name of a variable"),
        (f'{LEAST}[environment]\nA = "x\\u0000"', "'A' has a zero byte in its value"),
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
