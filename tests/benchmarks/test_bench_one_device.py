"""A record that no benchmark knows of: one device, sizes and operands of its own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from bench_cases import case_of
from grouped_record import GROUPED

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.commands import bench, tune
from stretto.benchmarks.measurements import results
from stretto.benchmarks.predict import predictions
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.benchmarks.timing import memory
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.kernels.choice import tables
from stretto.kernels.operations import OPERATIONS

SHAPE = "64x32x16x4"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(OPERATIONS, GROUPED.name, GROUPED)


def test_it_is_timed(tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["grouped", "--devices", "2", "--repeats", "2", "--no-torch", "--json", str(path)]
    assert bench.main([*options, "--shapes", f"experts,{SHAPE}"]) == 0
    (found,) = results.read(path).measurements
    assert found.key == ("grouped", (64, 32, 16, 4), "bfloat16", 1, "")
    assert (found.shape, found.more_sizes) == (SHAPE, {"g": 4})
    assert found.flops == 2 * 64 * 32 * 16
    assert [timed.peer for timed in found.timed] == ["auto", "xla", "matmul"]
    missing = {entry.peer: entry.reason for entry in found.missing}
    others = {"xla-windowed", "own-matmul", "xla-contiguous", "ring", "jax-pallas", "xla-ragged"}
    others |= {"torch", "torch-symm"}
    assert missing.keys() == {"fused"} | others
    assert missing["jax-pallas"] == "JAX Pallas has no such operation"
    assert found.of("auto").relative_error < 1e-2
    whole = [timed.time for timed in found.timed if timed.peer in ("auto", "xla")]
    assert found.floor == min(found.matmul_floor, *whole) > 0
    assert f"grouped {SHAPE} bfloat16, 1 device" in capsys.readouterr().out
    assert bench.main(["show", str(path)]) == 0
    assert bench.main(["show", str(path), "--report", str(tmp_path / "r.html")]) == 0
    assert SHAPE in (tmp_path / "r.html").read_text()


def test_it_is_tuned(tmp_path):
    path = tmp_path / "t.toml"
    options = ["grouped", "--shapes", SHAPE, "--repeats", "1", "--output", str(path)]
    assert tune.main(options) == 0
    (entry,) = tables.read(path).entries
    assert entry.sizes == {"m": 64, "k": 32, "n": 16, "g": 4}
    assert entry.config["tile_m"] in (64, 128)
    assert tune.main(options) == 0
    assert tables.read(path).entries == (entry,)


def test_it_runs_on_one_device_among_others():
    sweep = Sweep(kernels=("all_gather", "grouped"), devices=(2,), shapes=("tiny",))
    tasks = expand([sweep], 4, on_gpu=False)
    assert {(item.case.operation.name, item.case.devices) for item in tasks} == {
        ("all_gather", 2),
        ("grouped", 1),
    }
    assert "experts" in shapes.set_names()


def test_its_operands_are_drawn_as_the_record_says():
    case = case_of("grouped", SHAPE, 1, "bfloat16")
    candidate = Candidate(body=case.call("xla"), operands=case.operands)
    for mesh in (mesh_of(1), mesh_of(2)):
        with Compiler() as compiler:
            first, second = Operands(mesh, "bfloat16", compiler).sets(candidate, 2)
        sizes = np.asarray(first[2]).reshape(mesh.size, 4)
        assert first[2].dtype == np.int32
        assert (sizes.sum(1) == 64).all()
        assert (sizes != np.asarray(second[2]).reshape(mesh.size, 4)).any()
        assert first[1].shape == (4 * mesh.size, 32, 16)


def test_it_needs_the_memory_of_all_its_matrices():
    case = case_of("grouped", SHAPE, 1, "bfloat16")
    assert case.footprint == 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16) + 4 * 4
    assert memory.needed_bytes(case, 2) > 4 * case.footprint
    found = predictions.predict(case, "NVIDIA H200")
    assert found.more_sizes == {"g": 4}
    assert 0 < found.fused_low < found.fused < found.fused_high
    assert jax.device_count() > 1
