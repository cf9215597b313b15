"""Jobs under a real Slurm on two hosts, which are network namespaces: `pytest --slow`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import network_hosts
import pytest
import slurm_cluster

ROOT = Path(__file__).parents[2]
REASON = network_hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.xdist_group("network_hosts"),
]
BIN = Path(sys.executable).parent
EIGHT = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n" for i in range(8))
WHERE = (
    "import os, socket\nprint('at', socket.gethostname(), os.environ['STRETTO_PROCESS_ID'], "
    "os.environ['STRETTO_LOCAL_PROCESS_ID'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[slurm_cluster.Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    root = slurm_cluster.fetch(folder)
    if isinstance(root, str):
        pytest.skip(root)
    with (
        network_hosts.make_hosts(2, folder) as hosts,
        slurm_cluster.make_slurm(hosts, root, ("1,2", "0,1")) as running,
    ):
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(WHERE)
    return path


def env(slurm, **more: str) -> dict[str, str]:
    return {"PATH": f"{BIN}:{slurm.environ['PATH']}", "JAX_PLATFORMS": "cpu", **more}


def run_in(slurm, allocation: tuple[str, ...], *options: object, **more: str):
    """`stretto run` in an allocation that salloc makes."""
    argv = ["salloc", "--quiet", *allocation, "stretto", "run", *map(str, options)]
    done = slurm.run(*argv, env=env(slurm, **more))
    words = [line.partition("at ")[2] for line in done.stdout.splitlines() if "at " in line]
    return done, sorted(words)


def test_batch_file_on_two_nodes(slurm, tmp_path):
    """The file that is shipped, but for its GPUs, which the nodes do not have."""
    batch = (ROOT / "docker" / "slurm.sbatch").read_text()
    without = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", batch)
    on_cpus = without.replace("--platform cuda", "--platform cpu")
    assert batch != without != on_cpus
    (tmp_path / "slurm.sbatch").write_text(on_cpus)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    argv = ("sbatch", "--wait", f"--chdir={tmp_path}", f"--output={tmp_path}/log")
    done = slurm.run(*argv, str(tmp_path / "slurm.sbatch"), limit_s=280, env=env(slurm))
    log = (tmp_path / "log").read_text()
    assert done.returncode == 0, log + done.stderr + slurm.logs()
    assert "[0] devices: 2 x cpu, processes: 2" in log
    assert list(tmp_path.glob("logs-*/**/process-1.log"))


def test_every_node_has_its_own_gpus(slurm, script):
    """The launching node's CUDA_VISIBLE_DEVICES is its own."""
    tools = script.parent / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'E'\n{EIGHT}E\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{BIN}:{slurm.environ['PATH']}"
    more = {"JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": "1,2", "PATH": path}
    done, words = run_in(slurm, ("-N2",), "--platform", "cuda", script, **more)
    a, b = slurm.hosts.names
    assert words == [f"{a} 0 0 1,2", f"{b} 1 0 0,1"], done.stderr


def test_gpus_that_slurm_promised_and_are_not_there(slurm, script):
    more = {"JAX_PLATFORMS": "", "SLURM_GPUS_ON_NODE": "8"}
    done, words = run_in(slurm, ("-N2",), script, **more)
    assert done.returncode == 2
    assert words == []
    assert "which is no GPU of host" in done.stderr


def test_one_named_host_of_two(slurm, script):
    a, b = slurm.hosts.names
    done, words = run_in(slurm, ("-N2",), "--hosts", f"{b}:1", script)
    assert [word.split()[:2] for word in words] == [[b, "0"]], done.stderr
    done, words = run_in(slurm, ("-N1", "-w", a), "--hosts", f"{b}:1", script)
    assert done.returncode == 2
    assert f"host {b} is not of this Slurm allocation, which has {a}" in done.stderr


def test_uneven_hosts_in_another_order(slurm, script):
    a, b = slurm.hosts.names
    done, words = run_in(slurm, ("-N2", "-n4"), "--hosts", f"{b}:2,{a}:1", script)
    assert [word.split()[:3] for word in words] == [[a, "2", "0"], [b, "0", "0"], [b, "1", "1"]]
    assert done.returncode == 0, done.stderr


def test_tasks_of_the_allocation(slurm, script):
    done, words = run_in(slurm, ("-N2", "--ntasks-per-node=2"), script)
    a, b = slurm.hosts.names
    assert [word.split()[:2] for word in words] == [[a, "0"], [a, "1"], [b, "2"], [b, "3"]]
    assert done.returncode == 0, done.stderr


def test_inside_a_step_that_holds_the_node(slurm, script):
    """As in the shell of `srun --pty bash`."""
    argv = ("srun", "-N1", "-n1", "--exclusive", "stretto", "run", "-n", "2", str(script))
    done = slurm.run(*argv, env=env(slurm))
    assert done.returncode == 0, done.stderr  # else the time to start passes
    assert done.stdout.count("at ") == 2


def test_job_that_slurm_ends(slurm, script):
    """It is Slurm that ended it, in Slurm's words, and not a want of memory."""
    begun = script.parent / "begun"
    script.write_text(
        f"import os, time\nopen({str(begun)!r} + os.environ['STRETTO_PROCESS_ID'], 'w')\n"
        "time.sleep(200)\n"
    )
    log = script.parent / "log"
    wrapped = f"{BIN}/stretto run {script}"
    slurm.run("sbatch", "-N2", f"--output={log}", "--wrap", wrapped, env=env(slurm))
    until = time.monotonic() + 60
    while len(list(script.parent.glob("begun?"))) < 2:
        assert time.monotonic() < until, log.read_text() + slurm.logs()
        time.sleep(0.1)
    job = slurm.run("squeue", "--noheader", "--format=%i").stdout.strip()
    slurm.run("scancel", f"{job}.0")  # the step alone: the launcher lives to tell
    while slurm.run("squeue", "--noheader").stdout.strip():
        assert time.monotonic() < until
        time.sleep(0.2)
    text = log.read_text()
    assert "out of memory" not in text
    assert re.search("ended by mpirun or srun|its launcher ended it", text), text
    assert "CANCELLED" in text


def test_srun_arguments_are_handed_on(slurm, script):
    extra = "--launcher-args=--job-name=mine --comment=x"
    script.write_text("import os\nprint('at', os.environ['SLURM_JOB_NAME'])")
    done, words = run_in(slurm, ("-N2",), extra, script)
    assert words == ["mine", "mine"], done.stderr
