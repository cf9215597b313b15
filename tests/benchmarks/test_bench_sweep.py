"""Whole runs on CPU devices: what is timed, recorded, resumed, and refused."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import pytest
from bench_cases import case_of

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.commands import show
from stretto.benchmarks.commands import tune as tune_command
from stretto.benchmarks.errors import BenchmarkError, DeviceLostError, UnavailableError
from stretto.benchmarks.measurements import machine, results
from stretto.benchmarks.peers import torch_peers
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.sweeps import run
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep, read_sweeps
from stretto.benchmarks.timing import memory, prepare
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Settings, measure, take

QUICK = Settings(repeats=2, rest_s=0.0)
CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "bench"


def measured(peers, case=None, **settings):
    chosen = [PEERS[peer] if isinstance(peer, str) else peer for peer in peers]
    return measure(case or case_of(), chosen, dataclasses.replace(QUICK, **settings), None)


def peer_of(name, body, role="fused"):
    def candidates(case, mesh):
        return [Candidate(body=body, operands=case.operands)]

    return dataclasses.replace(PEERS["auto"], name=name, role=role, candidates=candidates)


def test_a_run_writes_what_the_table_shows(tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["all_gather_matmul", "--shapes", "64x32x32", "--devices", "2", "--repeats", "2"]
    options += ["--peers", "auto,xla,matmul,communication,fused,torch"]
    assert command.main([*options, "--json", str(path), "--no-torch"]) == 0
    out = capsys.readouterr().out
    found = results.read(path)
    (measurement,) = found.measurements
    assert "the times show that the benchmark runs, not how fast anything is" in out
    assert not found.measurement_of_speed
    assert [timed.peer for timed in measurement.timed] == ["auto", "xla", "matmul", "communication"]
    assert all(len(timed.samples) == 2 for timed in measurement.timed)
    assert all(timed.time > 0 for timed in measurement.timed)
    auto = measurement.of("auto")
    assert auto.relative_error < 1e-2
    assert auto.over_xla > 0
    assert auto.share_of_floor == pytest.approx(measurement.floor / auto.time)
    missing = {entry.peer: entry.reason for entry in measurement.missing}
    assert set(missing) == {"fused", "torch"}
    assert missing["fused"].startswith("all_gather_matmul: backend='pallas' cannot serve this call")
    assert "collective alone" in out and "NCCL" not in out  # XLA's own, on a CPU.
    assert "no torch: PyTorch's helper process is not used" in out
    assert found.machine.versions["jax"] == jax.__version__
    assert "Stretto auto over XLA, 1 cases" in out


def test_a_run_is_resumed_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    base = ["all_gather", "--devices", "2", "--repeats", "1", "--peers", "xla", "--no-torch"]
    base += ["--json", str(path)]
    assert command.main([*base, "--shapes", "64x32"]) == 0
    first = results.read(path).measurements
    assert command.main([*base, "--shapes", "64x32,32x32"]) == 2  # would overwrite
    assert results.read(path).measurements == first
    assert command.main([*base, "--shapes", "64x32,32x32", "--resume"]) == 0
    resumed = results.read(path).measurements
    assert resumed[0] == first[0]
    assert [m.m for m in resumed] == [64, 32]
    assert command.main([*base, "--shapes", "32x32", "--overwrite"]) == 0
    assert [m.m for m in results.read(path).measurements] == [32]


def test_results_of_another_machine_are_not_gone_on_with(tmp_path, make_results, capsys):
    path = tmp_path / "r.json"
    results.write(make_results(), path)
    options = ["all_gather", "--shapes", "64x32", "--json", str(path), "--resume"]
    assert command.main(options) == 2
    assert "its card is 'NVIDIA H100 80GB HBM3', here it is" in capsys.readouterr().err


def test_the_time_limit_ends_a_run_and_resuming_finishes_it(tmp_path, capsys):
    path = tmp_path / "r.json"
    base = ["all_gather", "--shapes", "64x32", "--devices", "2", "--repeats", "1"]
    base += ["--peers", "xla", "--no-torch", "--json", str(path)]
    assert command.main([*base, "--budget", "0"]) == 0
    assert "time limit has passed" in capsys.readouterr().err
    assert not path.exists()
    assert command.main([*base, "--budget", "100"]) == 0
    assert len(results.read(path).measurements) == 1


def test_a_slow_auto_fails_the_run(tmp_path, monkeypatch):
    path = str(tmp_path / "r.json")
    base = ["all_gather", "--shapes", "64x32", "--devices", "2", "--repeats", "1", "--no-torch"]
    base += ["--peers", "auto,xla", "--json", path]
    assert command.main([*base, "--max-slowdown", "100000"]) == 0
    assert command.main([*base, "--resume", "--max-slowdown", "-99.9"]) == 1


@pytest.mark.parametrize("program", [command, tune_command, show])
def test_help_names_what_options_take(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    out = capsys.readouterr().out
    assert "FILE" in out
    assert "{None}" not in out and "[[" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "kernel 'nothing' is not one of all_gather_matmul"),
        ([], "no kernel"),
        (["all", "--shapes", "llama"], "neither a set .*llama-70b"),
        (["all_gather", "--shapes", "2x2x2"], "all_gather takes MxN"),
        (["all_gather", "--devices", "64"], "devices=64 and 8 are present"),
        (["all_gather", "--devices", "two"], "are not like 1,2,4"),
        (["all_gather", "--devices", "0"], "at least 1"),
        (["all_gather", "--peers", "nccl"], "peer 'nccl' is not one of fused"),
        (["all_gather", "--dtypes", "int8"], "dtype 'int8' is not one of"),
        (["all_gather", "--scaling", "big"], "scaling 'big'"),
        (["all_gather", "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["all_gather", "--shapes", "gpt-3"], "nothing to measure"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
        (["all_gather", "--config", "x.toml"], "one or the other"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json: No such file"),
        (["document"], "no results"),
    ],
)
def test_misuse_is_one_line_and_status_2(options, message, capsys):
    assert command.main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line for line in captured.err.splitlines() if line.startswith("stretto ")] == [
        captured.err.splitlines()[-1]
    ]
    assert "Traceback" not in captured.err
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(captured.err))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_sweeps_are_valid(path, capsys):
    assert expand(read_sweeps(path), 8, on_gpu=True)
    assert command.main(["--config", str(path), "--list"]) == 0
    *cases, total = capsys.readouterr().out.splitlines()
    assert total.startswith(f"{len(cases)} cases, about ")


def test_a_sweep_is_tried_out_with_small_shapes(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    options = ["all_gather_matmul", "--shapes", "llama-70b", "--devices", "2", "--repeats", "1"]
    options += ["--peers", "auto,xla", "--no-torch", "--rehearse", "--budget", "60"]
    monkeypatch.setattr(machine, "_commit", str)
    assert command.main([*options, "--json", str(path), "--commit", "0123abc"]) == 0
    assert results.read(path).machine.commit == "0123abc"
    found = results.read(path).measurements
    assert len(found) == 7
    assert max(max(m.m, m.k, m.n) for m in found) <= 240
    assert [m.m for m in found] == [160, 176, 192, 208, 224, 240, 224]


def test_peers_of_several_sweeps_are_timed_together():
    sweeps = [
        Sweep(kernels=("all_gather",), shapes=("64x32", "32x32"), devices=(2,), peers=(peer,))
        for peer in ("xla", "auto")
    ]
    tasks = expand(sweeps, 4, on_gpu=False)
    assert [item.case.sizes["m"] for item in tasks] == [64, 32]
    assert [[peer.name for peer in item.peers] for item in tasks] == [["xla", "auto"]] * 2


def test_a_sweep_file_with_a_wrong_field_names_it(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[[sweep]]\nkernel = ["all_gather"]\n')
    with pytest.raises(BenchmarkError, match="unknown field `kernel`"):
        read_sweeps(path)


def test_weak_scaling_grows_the_rows():
    sweep = Sweep(kernels=("all_gather",), shapes=("64x32",), devices=(1, 2, 4), scaling="weak")
    tasks = expand([sweep], 4, on_gpu=False)
    assert [(item.case.devices, item.case.sizes["m"]) for item in tasks] == [
        (1, 64),
        (2, 128),
        (4, 256),
    ]


def test_a_shape_that_cannot_be_cut_is_recorded():
    assert "m=65 is not a multiple of 2" in measured(["xla"], case_of(shape="65x32x32")).skipped


def test_a_shape_that_does_not_fit_is_recorded_before_it_is_allocated():
    huge = case_of("all_reduce", f"{1 << 20}x{1 << 20}")
    found = measured(["xla"], huge)
    assert "it needs 48378.5 GB on each device" in found.skipped
    with pytest.raises(UnavailableError, match="GB are there"):
        memory.check_fits(huge, mesh_of(2))


def test_one_failing_peer_leaves_the_others():
    def broken(lhs, rhs):
        raise RuntimeError("does not compile\nat all")

    found = measured([peer_of("broken", broken), "xla"])
    assert [timed.peer for timed in found.timed] == ["xla"]
    assert [(m.peer, m.reason) for m in found.missing] == [
        ("broken", "RuntimeError: does not compile")
    ]


def test_a_wrong_result_is_not_timed():
    unfused = case_of().call("xla")
    wrong = peer_of("wrong", lambda lhs, rhs: unfused(lhs, rhs) * 1.01)
    found = measured([wrong, "xla"])
    assert [timed.peer for timed in found.timed] == ["xla"]
    assert "its result is wrong: relative error 0.01" in found.missing[0].reason
    found = measured([wrong, "xla"], check=False)
    assert [timed.peer for timed in found.timed] == ["wrong", "xla"]


def test_the_fastest_candidate_is_kept(monkeypatch):
    unfused = case_of().call("xla")

    def candidates(case, mesh):
        def slow(lhs, rhs):
            return sum(unfused(lhs + i, rhs) for i in range(64))

        return [
            Candidate(body=slow, operands=case.operands, config="slow"),
            Candidate(body=unfused, operands=case.operands, config="quick"),
        ]

    several = dataclasses.replace(PEERS["jax-pallas"], candidates=candidates)
    assert measured([several]).timed[0].config == "quick"


def test_xlas_time_does_not_pass_for_our_kernels(monkeypatch):
    """`backend="pallas"` that in truth launches no kernel."""
    monkeypatch.setattr(prepare, "is_gpu", bool)
    ours = peer_of("fused", case_of().call("xla"))
    found = measured([ours], check=False)
    assert found.missing[0].reason == "the call launched no kernel of Stretto"


def test_what_serves_auto_is_recorded():
    assert measured(["auto"]).of("auto").backend == "xla"


def test_the_same_program_is_compiled_once(monkeypatch):
    made = []
    start = Compiler._start

    def count(self, compile_it, by_xla):
        made.append(compile_it)
        return start(self, compile_it, by_xla)

    monkeypatch.setattr(Compiler, "_start", count)
    found = measured(["auto", "xla", "matmul"], check=False)
    assert len(found.timed) == 3
    fills = 3  # of lhs, gathered lhs and rhs
    assert len(made) == fills + 2  # here `auto` is XLA's


def test_the_same_program_is_timed_once():
    found = measured(["auto", "xla", "matmul"])
    assert found.of("auto").samples == found.of("xla").samples
    assert found.of("auto").over_xla == 1
    assert found.of("matmul").samples != found.of("xla").samples


def test_lost_devices_end_the_run_and_keep_what_was_measured(tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.json"

    def lose(prepared, *rest):
        if prepared.case.sizes["m"] == 32:
            raise DeviceLostError("the devices stopped responding")
        return take(prepared, *rest)

    monkeypatch.setattr(run, "take", lose)
    options = ["all_gather", "--shapes", "64x32,32x32,16x32", "--devices", "2", "--repeats", "1"]
    options += ["--peers", "xla", "--no-torch", "--json", str(path)]
    assert command.main(options) == 1
    reason = "all_gather 32x32 bfloat16 on 2: the devices stopped responding"
    assert reason in capsys.readouterr().err
    first, lost = results.read(path).measurements
    assert (first.m, lost.m) == (64, 32)
    assert first.timed and not lost.timed
    assert lost.skipped == "it lost the devices: the devices stopped responding"
    # Going on goes past it.
    assert command.main([*options, "--resume"]) == 0
    assert [m.m for m in results.read(path).measurements] == [64, 32, 16]


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """A function of what the fake interpreter does that makes a helper over it."""
    script = pathlib.Path(__file__).with_name("fake_torch_worker.py")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    wrapper.chmod(0o755)
    made = []

    def make(what: str) -> torch_peers.TorchHelper:
        monkeypatch.setenv("FAKE", what)
        made.append(torch_peers.TorchHelper(str(wrapper), on_gpu=True))
        return made[-1]

    yield make
    for one in made:
        process = one._process
        one.close()
        assert process is None or process.poll() is not None


def test_pytorchs_times_take_their_turn(helper):
    found = measure(case_of(), [PEERS["torch"], PEERS["xla"]], QUICK, helper("works"))
    assert found.of("torch").samples == [100.0, 101.0]
    assert found.of("torch").over_xla > 0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("never", "PyTorch's helper did not start: RuntimeError: no NCCL"),
        ("errs", "RuntimeError: out of memory"),
        ("dies", "PyTorch's helper process ended: Segmentation fault (not really)"),
    ],
)
def test_pytorchs_failures_are_told_and_leave_the_others(helper, what, reason):
    peers = [PEERS["torch"], PEERS["xla"], PEERS["torch-symm"]]
    found = measure(case_of(), peers, QUICK, helper(what))
    assert [timed.peer for timed in found.timed] == ["xla"]
    assert {entry.reason for entry in found.missing} == {reason}


def test_a_helper_that_hangs_is_given_up(helper, monkeypatch):
    monkeypatch.setattr(torch_peers, "ANSWER_TIMEOUT_S", 1.0)
    found = measure(case_of(), [PEERS["torch"], PEERS["xla"]], QUICK, helper("hangs"))
    assert found.missing[0].reason == "no answer in 1 s"


def test_without_pytorch_its_peers_are_named_as_missing(monkeypatch):
    monkeypatch.setattr(torch_peers.importlib.util, "find_spec", lambda name: None)
    helper = torch_peers.TorchHelper(None, on_gpu=False)
    found = measure(case_of(), [PEERS["torch"]], QUICK, helper)
    assert "PyTorch is not installed" in found.missing[0].reason
