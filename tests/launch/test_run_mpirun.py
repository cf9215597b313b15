"""Jobs through a real mpirun, and JAX in them."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from stretto.launch.planning.launchers import find_mpirun

MPIRUN = find_mpirun()
pytestmark = pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun that works")
BARE = (
    *(() if MPIRUN is None else (MPIRUN.path,)),
    *(("--bind-to", "none") if MPIRUN and MPIRUN.flavour == "openmpi" else ()),
)
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

SUM = """
import sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import stretto.launch

process = stretto.launch.initialize()
assert stretto.launch.initialize() is process
n = len(jax.devices())
mesh = jax.make_mesh((n,), ("x",))
one_each = jax.NamedSharding(mesh, P("x"))
data = np.arange(1.0, n + 1)
x = jax.make_array_from_callback((n,), one_each, lambda index: data[index])
add = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"),
                            out_specs=P()))
total = float(add(x).addressable_data(0)[0])
sys.stdout.write(f"{process.process_id} {process.num_processes} {n} {total}\\n")
"""


def words_of(result) -> list[str]:
    """What the script wrote; gloo greets on stdout, too."""
    return sorted(line for line in result.stdout.splitlines() if "[Gloo]" not in line)


def test_sum_over_processes(run_job):
    result = run_job(SUM, "-n", "2")
    assert result.status == 0, result.stderr
    assert words_of(result) == ["[0] 0 2 2 3.0", "[1] 1 2 2 3.0"]


def test_a_reduce_scatter_of_the_scripts_own_waits_for_late_processes(run_job):
    """It is a sum, which waits as long as it takes; gloo's own gives them 30 s."""
    script = SUM.partition("total =")[0] + (
        "scatter = jax.shard_map(lambda a: jax.lax.psum_scatter(a, 'x', tiled=True), mesh=mesh,\n"
        "                        in_specs=P(), out_specs=P('x'))\n"
        "print('reduce_scatter' in jax.jit(scatter).lower(data).as_text())"
    )
    result = run_job(script, "-n", "2")
    assert words_of(result) == ["[0] False", "[1] False"], result.stderr


def test_one_process_with_several_devices(run_job):
    result = run_job(SUM, "-n", "3", "--processes-per", "node")
    assert result.status == 0, result.stderr
    assert result.stdout == "[0] 0 1 3 6.0\n"


def test_exception_under_jax_ends_the_job(run_job):
    """Process 1 fails while 0 waits for it in a collective."""
    fail = SUM.replace("total =", "if process.process_id == 1: raise KeyError('gone')\ntotal =")
    result = run_job(fail, "-n", "2")
    assert result.status == 1
    assert result.last_line() == "KeyError: 'gone'"
    assert "process 1 of 2" in result.stderr


def test_exit_status_and_killed_process(start_job, tmp_path):
    script = "import os, time\nme = os.environ['STRETTO_PROCESS_ID']\n"
    script += "open(f'pid{me}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    job = start_job(script, "-n", "3")
    pids = [tmp_path / f"pid{i}" for i in range(3)]
    job.wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
    os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
    result = job.result()
    assert result.status == 137
    assert "process 2 of 3" in result.last_line()
    assert result.left == []


def test_restart_after_mpirun_was_killed(start_job, tmp_path):
    """By a kill by hand, or by the kernel; the processes are gone before the next ones start."""
    script = "import os, time\nattempt = os.environ['STRETTO_RESTART']\n"
    script += "open('begun' + attempt, 'w').close()\nif attempt == '0': time.sleep(600)\n"
    script += "print('attempt', attempt)"
    options = ("--launcher", "mpirun", "-n", "1", "--restarts", "1")
    job = start_job(script, *options)
    job.wait_for((tmp_path / "begun0").exists)
    os.kill(job.child_named("mpirun", "prterun", "mpiexec.hydra"), signal.SIGKILL)
    result = job.result()
    assert result.status == 0, result.stderr
    assert result.stdout == "[0] attempt 1\n"
    assert "mpirun or srun has ended, too" in result.stderr
    assert "restart 1 of 1" in result.stderr
    assert result.left == []


def test_nothing_outlives_a_killed_supervisor(start_job, tmp_path):
    """Neither mpirun, nor what it started in other sessions, nor a folder of temporary files."""
    (tmp_path / "tmp").mkdir()
    script = "import time\nopen('begun', 'w').close()\ntime.sleep(600)"
    job = start_job(
        script, "--launcher", "mpirun", "-n", "1", env={"TMPDIR": str(tmp_path / "tmp")}
    )
    job.wait_for((tmp_path / "begun").exists)
    job.process.kill()
    assert job.result().left == []
    assert not list((tmp_path / "tmp").glob("stretto-*"))


def test_mpi4py_sees_the_same_processes(run_job):
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    script = "from mpi4py import MPI\nimport stretto.launch, os\nw = MPI.COMM_WORLD\n"
    script += "print(w.Get_rank() == int(os.environ['STRETTO_PROCESS_ID']), w.allreduce(1))"
    result = run_job(script, "-n", "2")
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] True 2", "[1] True 2"]


def bare(start_job, script: str, n: int):
    command = (*BARE, "-n", str(n), sys.executable)
    return start_job(script, command=command, env={**ROOT_MAY, **OVERSUBSCRIBE}).result(60)


def test_bare_mpirun(start_job):
    result = bare(start_job, SUM, 2)
    assert result.status == 0, result.stderr
    assert words_of(result) == ["0 2 2 3.0", "1 2 2 3.0"]


@pytest.mark.slow
def test_exception_under_bare_mpirun(start_job):
    fail = SUM.replace("total =", "if process.process_id == 1: raise KeyError('gone')\ntotal =")
    result = bare(start_job, fail, 2)
    assert result.status != 0
    assert "KeyError: 'gone'" in result.stderr
    assert result.left == []


@pytest.mark.slow
def test_process_that_never_arrives(run_job):
    """The report tells it from those that wait for it, by step and by line."""
    stuck = SUM.replace("import sys\n", "import sys, time\n", 1).partition("total =")[0]
    stuck += """
for step in range(9):
    stretto.launch.progress(step, "psum")
    if step == 5 and process.process_id == 1:
        stretto.launch.progress(step)
        time.sleep(1000)
    float(add(x).addressable_data(0)[0])
"""
    result = run_job(stuck, "-n", "3", "--timeout", "30")
    assert result.status == 124
    missing, waiting = result.stderr.rstrip().splitlines()[-2:]
    assert missing.startswith("  process 1: at step 5, at ")
    assert missing.endswith("time.sleep(1000)")
    assert waiting.startswith("  processes 0, 2: at step 5 in psum, at ")
    assert waiting.endswith("float(add(x).addressable_data(0)[0])")
