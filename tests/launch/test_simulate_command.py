"""`stretto simulate`: runs any script with the simulator on, and prints the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jax
import pytest

from stretto.launch import cli

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec as P

def body(x_ref, out_ref, received_sem):
    to = {"x": lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))}
    plgpu.remote_ref(out_ref, to)[...] = x_ref[...] + 0
    if "forget" not in sys.argv:
        pl.semaphore_signal(received_sem, device_id=to)
    pl.semaphore_wait(received_sem)

def fn(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SemaphoreType.REGULAR])(x)

mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
fn = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
print("devices", jax.device_count(), "result", float(fn(jnp.arange(3 * 128.0))[0]), sys.argv[1:])
sys.exit(7 if "seven" in sys.argv else 0)
"""


@pytest.fixture
def run_alone(tmp_path):
    """Runs the command in a process of its own, whose devices it makes."""
    script = tmp_path / "script.py"

    def run(*options, args=(), text=SCRIPT):
        script.write_text(text)
        command = [sys.executable, "-m", "stretto.launch", "simulate", *options]
        return subprocess.run(
            [*command, str(script), *args], capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command in this process, which has imported JAX, on the devices that it has."""
    script = tmp_path / "script.py"

    def run(*options, args=(), text=SCRIPT):
        script.write_text(text)
        command = ["simulate", "-n", str(jax.device_count()), *options, str(script), *args]
        try:
            status = cli.main(command)
        except SystemExit as end:  # of an option that is none
            status = end.code
        said = capsys.readouterr()
        return subprocess.CompletedProcess(command, status, said.out, said.err)

    return run


def test_a_target_is_chosen(run):
    text = "from stretto.distributed import simulator; print(simulator.simulated_target().title)"
    assert run("--target", "b200", text=text).stdout == "a B200\n"
    assert "invalid choice: 'b300'" in run("--target", "b300", text=text).stderr


def test_runs_a_script_and_prints_the_report(run_alone, tmp_path):
    trace = tmp_path / "trace.json"
    done = run_alone("-n", "3", "--seeds", "2", "--trace", str(trace), args=("--its", "own"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("devices 3 result 256.0 ['--its', 'own']") == 2
    assert done.stderr.splitlines() == [
        "simulation, seed 0 (pct): 1 kernel launches, nothing wrong found",
        "simulation, seed 1 (random): 1 kernel launches, nothing wrong found",
        "2 seeds, 2 kernel launches: nothing wrong found",
    ]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}


def test_a_deadlock_fails_the_command(run):
    done = run(args=("forget",))
    assert done.returncode == 1
    assert "received_sem >= 1, which is 0" in done.stderr
    assert "pl.semaphore_wait(received_sem)" in done.stderr
    assert "seed 0 failed; --seed 0 runs it again" in done.stderr
    assert "nothing wrong" not in done.stderr


@pytest.mark.compiles
def test_a_kernel_that_no_gpu_runs_fails_the_command_unless_told_otherwise(run):
    odd = SCRIPT.replace("3 * 128.0", "3 * 100.0")
    done = run("--seeds", "2", text=odd)
    assert done.returncode == 1
    assert "[does not compile] JAX does not lower kernel body for an H100" in done.stderr
    assert "script.py:13 (body): plgpu.remote_ref(out_ref, to)" in done.stderr
    done = run("--seeds", "2", "--no-hardware", text=odd)
    assert done.returncode == 0, done.stderr
    assert "2 seeds, 2 kernel launches: nothing wrong found" in done.stderr


def test_the_status_is_the_script_s(run):
    done = run("--seeds", "2", args=("seven",))
    assert done.returncode == 7
    assert "the script ended with status 7" in done.stderr
    assert "nothing wrong" not in done.stderr


def test_no_fault_leaves_a_report_that_finds_nothing_wrong(run):
    beyond = "out_ref[pl.ds(x_ref[0].astype(jnp.int32) + 999, 8)] = jnp.zeros(8)"
    done = run(text=SCRIPT.replace("pl.semaphore_wait(received_sem)", beyond))
    assert done.returncode == 1
    assert "KernelFaultError" in done.stderr
    assert "nothing wrong" not in done.stderr


LAUNCHED = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec as P
from stretto.distributed import kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team

def fn(x):
    team = Team.along("x")
    def body(x_ref, out_ref, *, received):
        peer = team.neighbour(1)
        plgpu.remote_ref(out_ref, {"x": peer})[...] = x_ref[...] + 0
        received.signal(peer_id=peer)
        received.wait()
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return kernel.launch(
        body, x, name="shift", team=team, out_type=[out], num_blocks=1,
        semaphore_arrays=dict(received=SemaphoreArray()),
    )[0]

mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
fn = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
np.testing.assert_array_equal(fn(jnp.arange(4 * 128.0)), np.roll(np.arange(4 * 128.0), 128))
"""


@pytest.mark.parametrize(
    ("options", "status"), [(("--seeds", "2"), 0), (("--seeds", "4"), 1), (("--reversed",), 1)]
)
def test_some_seeds_count_devices_from_the_end(run, options, status):
    """A peer's number in place of `team.address` of it is wrong there only."""
    done = run(*options, text=LAUNCHED)
    assert done.returncode == status
    if not status:
        return
    assert "AssertionError" in done.stderr
    *_, last = done.stderr.splitlines()
    assert re.fullmatch(
        r"simulation, seed \d \(\w+, devices counted from the end\): the script ended so;"
        r" --seed \d runs it again",
        last,
    )


def test_a_script_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "stretto.launch", "simulate", str(tmp_path / "none.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "none.py does not exist" in done.stderr


def test_a_script_without_a_kernel_does_not_pass(run):
    done = run("--seeds", "3", text="print('ran')")
    assert done.returncode == 3
    assert done.stdout == "ran\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "simulation, seed 0 (pct): no kernel was simulated; print(stretto.explain("
    )


def test_a_script_with_a_simulation_of_its_own(run):
    own = "import stretto\nwith stretto.simulate(): " + "fn(jnp.arange(3 * 128.0))\n"
    done = run(text=SCRIPT.partition("print(")[0] + own)
    assert done.returncode == 0, done.stderr
    said = "simulation, seed 0 (pct): 1 kernel launches, in the script's own simulations"
    assert done.stderr == said + "\n"
    record = own.replace("simulate()", "simulate(on_finding='record')")
    race = SCRIPT.partition("print(")[0].replace("pl.semaphore_wait(received_sem)", "pass") + record
    done = run("--seeds", "2", text=race)
    assert done.returncode == 0, done.stderr
    assert f"{said}: 1 of them found something wrong" in done.stderr
    assert done.stderr.endswith("2 of the script's own simulations found something wrong\n")
    assert "nothing wrong found" not in done.stderr


@pytest.mark.parametrize("option", ["-n", "--seeds", "--blocks"])
def test_counts_below_one_are_refused(capsys, option):
    for value in ("0", "-2"):
        assert cli.main(["simulate", option, value, "script.py"]) == 2
        line = f"stretto simulate: {option} {value} must be at least 1\n"
        assert capsys.readouterr().err == line


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(capsys, tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "trace.json"):
        assert cli.main(["simulate", "--trace", str(path), "script.py"]) == 2
        assert f"--trace {path} cannot be written; give a file" in capsys.readouterr().err


def test_the_script_s_own_exception_is_shown_as_python_shows_it(run, tmp_path):
    done = run(text="def fail():\n    1 / 0\n\nfail()\n")
    plain = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == plain.stderr
