"""Whole runs of the transformer: stopped, crashed, and gone on with, bit for bit; its text."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import config
import jax
import network_hosts
import numpy as np
import orbax.checkpoint as ocp
import parallel
import pytest
import sample as sampling
import train
from folders import QUICKLY_COMPILED
from sample import sample
from step import make_train_step

import stretto as st
from stretto.launch.planning.launchers import find_mpirun

MPIRUN = find_mpirun()
EXAMPLE = Path(train.__file__).parent
SIZES = config.Sizes(layers=1, hidden=32, heads=4, kv_heads=4, feed_forward=32, sequence=16)
OPTIONS = ["--steps", "6", "--batch", "4", "--evaluate-every", "2"]


@pytest.fixture(autouse=True)
def small_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one test are of one small model, and share its compiled step."""
    monkeypatch.setitem(config.SIZES, "tiny", SIZES)
    monkeypatch.setattr(train, "make_train_step", functools.cache(make_train_step))
    monkeypatch.setattr(parallel, "loss", functools.cache(parallel.loss))


class Stop(Exception):
    pass


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def progress(at: int, what: str) -> None:
        if at == step and what == "train_step":
            raise Stop

    monkeypatch.setattr(train, "progress", progress)


def state_after(step: int, folder: Path) -> dict:
    """All arrays of a checkpoint: weights and the optimiser's."""
    return ocp.StandardCheckpointer().restore(folder / "tiny-1" / str(step) / "state")


def leave_half_a_checkpoint(folder: Path, step: int) -> Path:
    """As a crash does that comes before the whole of it is written, and renamed."""
    whole = folder / "tiny-1"
    half = whole / f"{step}.orbax-checkpoint-tmp"
    shutil.copytree(max(whole.glob("[0-9]"), key=lambda path: int(path.name)), half)
    files = sorted(path for path in half.rglob("*") if path.is_file())
    for path in files[::2]:
        path.unlink()
    return half


def test_run_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*OPTIONS, "--dp", "2", "--tp", "2", "--sample", "0", "--checkpoints"]
    whole = train.main([*options, str(tmp_path / "whole"), "--sample", "8"])
    assert len(whole) == 6
    text = capsys.readouterr().out.splitlines()[-1]
    assert text.startswith("def ")
    sampling.main([str(tmp_path / "whole" / "tiny-1"), "--count", "8"])
    assert capsys.readouterr().out.splitlines()[-1] == text
    stopped = [*options, str(tmp_path / "stopped")]
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, 5)
        train.main(stopped)
    halves = [leave_half_a_checkpoint(tmp_path / "stopped", step) for step in (5, 6)]
    capsys.readouterr()
    rest = train.main([*stopped, "--resume"])
    assert "going on after step 4 of" in capsys.readouterr().out
    assert rest == whole[4:]  # to the last bit
    ours, expected = (state_after(6, tmp_path / name) for name in ("stopped", "whole"))
    assert len(jax.tree.leaves(ours)) == 3 * 12 + 3  # weights, two moments; steps made, by three
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert not any(half.exists() for half in halves)
    with pytest.raises(ValueError, match="was trained with batch=4 and this run has 8"):
        train.main([*stopped, "--resume", "--batch", "8"])
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["tiny-1"]


@pytest.mark.slow
def test_run_goes_on_with_fewer_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a restart does that has lost a host: the checkpoint is of four devices."""
    options = [*OPTIONS, "--sample", "0", "--checkpoints"]
    four, two = ["--dp", "2", "--tp", "2"], ["--dp", "1", "--tp", "2"]
    whole = train.main([*options, str(tmp_path / "whole"), *four])
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, 5)
        train.main([*options, str(tmp_path / "lost"), *four])
    capsys.readouterr()
    rest = train.main([*options, str(tmp_path / "lost"), *two, "--resume"])
    assert "going on after step 4 of" in capsys.readouterr().out
    assert rest == pytest.approx(whole[4:], rel=1e-4)
    weights = (state_after(6, tmp_path / name)["weights"] for name in ("lost", "whole"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5), *weights)


def test_run_that_fails_has_written_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is renamed when the run closes its checkpoints, and not before."""
    rename, close, closing = os.rename, train.Checkpoints.close, threading.Event()

    def late(source, target, **options) -> None:
        if Path(target).name == "4":
            closing.wait(10)  # To the end of it, if none closes.
        rename(source, target, **options)

    def told(checkpoints: train.Checkpoints) -> None:
        closing.set()
        close(checkpoints)

    monkeypatch.setattr(os, "rename", late)
    monkeypatch.setattr(train.Checkpoints, "close", told)
    stop_at(monkeypatch, 5)
    with pytest.raises(Stop):
        train.main([*OPTIONS, "--dp", "1", "--tp", "1", "--checkpoints", str(tmp_path)])
    folder = tmp_path / "tiny-1"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]


def test_what_a_crash_has_left_is_gone_before_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "6.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    made = []
    manager = ocp.CheckpointManager

    def make(folder, **options):
        made.append(half.exists())
        return manager(folder, **options)

    monkeypatch.setattr(ocp, "CheckpointManager", make)
    with contextlib.closing(train.Checkpoints(tmp_path, {})) as checkpoints:
        assert checkpoints.newest() is None
    assert made == [False]


JOB = """
import json, os, sys

sys.path.insert(0, sys.argv.pop(1))
crashes = sys.argv.pop(1) == "crash"
import config, train
from stretto.launch import initialize

config.SIZES["tiny"] = config.{sizes}
rename = os.rename

def burn(source, target, **options):
    if crashes and os.path.basename(target) == "4" and initialize().restart == 0:
        os._exit(7)  # the checkpoint is written, but for its name
    rename(source, target, **options)

os.rename = burn
losses = train.main()
if initialize().process_id == 0:
    with open(os.path.join(os.path.dirname(__file__), "losses.json"), "w") as file:
        json.dump(losses, file)
"""


@pytest.mark.parametrize(
    ("processes", "steps", "fate"),
    [
        (2, 6, "ends well"),
        pytest.param(2, 6, "crash", marks=pytest.mark.slow),
        pytest.param(4, 100, "ends well", marks=pytest.mark.slow),
    ],
)
def test_job_of_several_processes_ends_as_one_process_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: int, steps: int, fate: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(sizes=SIZES))
    options = [*OPTIONS, "--steps", str(steps), "--sample", "8"]
    options += ["--checkpoints", str(tmp_path / "runs")]
    command = [sys.executable, "-m", "stretto.launch", "run", "-n", str(processes)]
    command += ["--restarts", "1", str(script), str(EXAMPLE), fate, *options]
    command += ["--dp", str(processes // 2), "--tp", "2"]
    env = os.environ | QUICKLY_COMPILED
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("restart 1 of 1" in done.stderr) == (fate == "crash"), done.stderr
    assert ("going on after step 2 of" in done.stdout) == (fate == "crash")
    alone = train.main([*options, "--tp", "1", "--dp", "1"])
    losses = json.loads((tmp_path / "losses.json").read_text())  # of the last start
    assert losses == pytest.approx(alone[-len(losses) :], rel=1e-4)
    assert len(losses) == (4 if fate == "crash" else steps)
    assert capsys.readouterr().out.splitlines()[-1] in done.stdout  # the text, too


LOSES_A_HOST = """
import json, os, sys, time

sys.path.insert(0, sys.argv.pop(1))
import config, train
from stretto.launch import initialize

config.SIZES["tiny"] = config.{sizes}
note = train.progress
checkpoint = os.path.join(os.path.dirname(__file__), "runs", "tiny-1", "4")

def wait_for_the_cut(step, what):
    note(step, what)
    if step == 5 and initialize().restart == 0:
        while not os.path.isdir(checkpoint):
            time.sleep(0.1)
        open(os.path.join(os.path.dirname(__file__), "at-5"), "w").close()
        time.sleep(60)

train.progress = wait_for_the_cut
losses = train.main()
if initialize().process_id == 0:
    with open(os.path.join(os.path.dirname(__file__), "losses.json"), "w") as file:
        json.dump(losses, file)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("network_hosts")
@pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun that works")
@pytest.mark.skipif(network_hosts.why_not() is not None, reason=str(network_hosts.why_not()))
@pytest.mark.parametrize("spare", [True, False], ids=["spare host", "fewer hosts"])
def test_job_goes_on_after_it_has_lost_a_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spare: bool
) -> None:
    """Two hosts with a device each; the second one's network is cut in the sixth step."""
    script = tmp_path / "job.py"
    script.write_text(LOSES_A_HOST.format(sizes=SIZES))
    train_options = [*OPTIONS, "--sample", "0", "--checkpoints", str(tmp_path / "runs")]
    with network_hosts.make_hosts(3 if spare else 2, tmp_path) as hosts:
        listed = ",".join(f"{name}:1" for name in hosts.names)
        run = [sys.executable, "-m", "stretto.launch", "run", "--hosts", listed, "-n", "2"]
        run += ["--restarts", "1", *([] if spare else ["--min-devices", "1"])]
        command = hosts.command(hosts.names[0], *run, str(script), str(EXAMPLE), *train_options)
        job = subprocess.Popen(
            command,
            env=os.environ | hosts.reach(MPIRUN) | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while not (tmp_path / "at-5").exists() and job.poll() is None:
            time.sleep(0.1)
        hosts.cut(hosts.names[1])
        said, _ = job.communicate(timeout=400)
    assert job.returncode == 0, said
    assert f"lost host {hosts.names[1]}" in said
    assert "going on after step 4 of" in said
    assert f"processes: {2 if spare else 1}," in said.partition("restart 1 of 1")[2]
    alone = train.main([*train_options, "--tp", "1", "--dp", "1"])
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(alone[4:], rel=1e-4)


@pytest.mark.slow
def test_run_over_split_sequences_is_that_of_one_device(tmp_path: Path) -> None:
    options = [*OPTIONS, "--dp", "1", "--tp", "1", "--sample", "8", "--checkpoints"]
    plain = train.main([*options, str(tmp_path / "plain")])
    split = train.main([*options, str(tmp_path / "split"), "--cp", "2"])
    assert split == pytest.approx(plain, rel=1e-5)


def test_text_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no checkpoint")):
        with pytest.raises(SystemExit, match=f"{folder} {why}; pass the folder of a run"):
            sampling.main([str(folder)])
    assert not list(tmp_path.iterdir())


def test_where_kernels_are_simulated_operands_have_a_type_that_they_take() -> None:
    def dtype(backend: str) -> str:
        return config.Execution.suited_to("cpu", backend).dtype

    assert dtype("auto") == dtype("xla") == "float32" and dtype("simulator") == "bfloat16"
    with st.simulate():
        assert dtype("auto") == "bfloat16" and dtype("xla") == "float32"


@pytest.mark.slow  # Weights and losses are, in test_transformer_model.py.
def test_text_is_the_same_on_every_mesh() -> None:
    texts = []
    for shape in ((1, 1), (2, 2)):
        mesh = parallel.make_mesh(*shape)
        weights = parallel.initial_weights(mesh, SIZES, seed=0)
        how = config.Execution(backend="xla")
        texts.append(sample(mesh, SIZES, how, weights, prompt=b"def ", count=6))
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"def ") and len(texts[0]) == 10


def test_prompt_longer_than_a_window_is_refused() -> None:
    mesh = parallel.make_mesh(1, 1)
    with pytest.raises(ValueError, match="prompt has 17 bytes; it must have 1 to 16"):
        sample(mesh, SIZES, config.Execution(), {}, prompt=b"x" * 17)
