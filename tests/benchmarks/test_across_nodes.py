"""The benchmark of several nodes: its versions compute the same, and it writes what it timed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench_cases import case_of
from selection import slow

from stretto.benchmarks import across_nodes
from stretto.benchmarks.cases.meshes import mesh_of_nodes
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import nodes
from stretto.benchmarks.peers.across_nodes import HIERARCHICAL, peers_across_nodes
from stretto.benchmarks.peers.peer import MATMUL
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.distributed import settings
from stretto.kernels.operations import OPERATIONS

BETWEEN = [one for one in OPERATIONS.values() if one.between_nodes is not None]
LABELS = ["XLA flat", "XLA hierarchical", "matmul alone"]


QUICK = ("all_gather", "matmul_all_reduce")  # A gather, and a sum of products.
NAMES = [one.name for one in HIERARCHICAL]


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in NAMES])
def test_versions_agree(name):
    """Also in the order of rows, on two nodes of four."""
    operation = OPERATIONS[name]
    mesh = mesh_of_nodes(2)
    case = case_of(operation.name, "x".join(["64"] * len(operation.sizes)), 8, "bfloat16")
    out = {}
    with Compiler() as compiler, settings.nodes_of(4):
        operands = Operands(mesh, case.dtype, compiler)
        for peer in peers_across_nodes("xla", [1]):
            if peer.role != MATMUL:
                (candidate,) = peer.candidates_for(case, mesh)
                result = programs.run_once(candidate, mesh, operands.sets(candidate, 1)[0])
                out[peer.label] = np.asarray(result, np.float32)
    flat = out.pop("XLA flat")
    assert len(out) == 2 and np.abs(flat).max() > 1
    for found in out.values():
        np.testing.assert_allclose(found, flat, rtol=0.03, atol=0.03 * np.abs(flat).max())


def test_every_operation_with_a_version_between_nodes_is_timed():
    assert across_nodes.Options().operations.split(",") == [one.name for one in BETWEEN]
    assert set(HIERARCHICAL) == set(BETWEEN)


def run(**options):
    across_nodes.main(across_nodes.Options(rounds=1, **options))


def test_what_it_writes(tmp_path, capsys):
    path = tmp_path / "across.json"
    run(operations="all_gather_matmul", shapes="64x64x64", backend="xla", json=path)
    written = json.loads(path.read_text())
    assert written["devices_per_node"] == 4 and written["machine"]["num_devices"] == 8
    (result,) = written["results"]
    versions = result["versions"]
    assert list(versions) == [*LABELS, "Stretto, 1 pieces"]
    assert nodes.read(path).results[0].versions["Stretto, 1 pieces"].backend == "xla"
    for name, found in versions.items():
        assert 0 < found["p10"] <= found["median"] <= found["p90"]
        assert ("difference" in found) == (name not in ("XLA flat", "matmul alone"))
    assert capsys.readouterr().out.startswith("all_gather_matmul 64x64x64 (us): XLA flat ")


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "across.json"
    with pytest.raises(BenchmarkError, match=r"No such file.*; pass what across_nodes.py wrote"):
        nodes.read(path)
    run(operations="all_gather", shapes="64x64", backend="xla", json=path)
    path.write_text(path.read_text().replace("across-nodes/1", "across-nodes/9"))
    with pytest.raises(BenchmarkError, match="schema 'stretto-across-nodes/9' is not 'stretto-acr"):
        nodes.read(path)


def named(on_gpu=True, **options):
    cases = across_nodes.cases_of(across_nodes.Options(**options), 8, on_gpu)
    return [(case.operation.name, case.shape) for case in cases]


def test_each_operation_takes_the_shapes_that_are_its_own():
    operations = "all_gather_matmul,all_reduce"
    assert named(operations=operations, shapes="64x32x64,256x64,tiny") == [
        *(("all_gather_matmul", shape) for shape in ("64x32x64", "256x128x128", "128x256x192")),
        *(("all_reduce", shape) for shape in ("256x64", "64x32", "256x128")),
    ]


def test_every_operation_has_shapes_small_ones_on_cpus():
    for on_gpu, rows in ((True, 16384), (False, 256)):
        found = named(on_gpu)
        assert list(dict.fromkeys(name for name, _ in found)) == [one.name for one in BETWEEN]
        assert max(int(shape.split("x")[0]) for _, shape in found) == rows


def test_on_cpus_it_rehearses_without_being_told(tmp_path):
    path = tmp_path / "across.json"
    across_nodes.main(across_nodes.Options(operations="all_gather", json=path))
    results = json.loads(path.read_text())["results"]
    assert [result["shape"] for result in results] == ["64x32", "256x128"]
    assert all("median" in one for result in results for one in result["versions"].values())


def test_what_cannot_be_compiled_is_told(capsys):
    """And does not keep the others from being timed."""
    run(operations="all_gather", shapes="64x64", backend="pallas", pieces="1")
    line = capsys.readouterr().out
    assert "Stretto, 1 pieces: all_gather: backend='pallas' cannot serve this call" in line
    assert line.startswith("all_gather 64x64 (us): XLA flat ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 3}, "nodes=3 must divide the 8 devices"),
        ({"operations": "all_gather,gather"}, "kernel 'gather' is not one of"),
        ({"shapes": "64x64,64x64x64", "operations": "all_gather"}, "all_gather takes MxN"),
        ({"shapes": "64x64", "operations": "all_gather_matmul"}, "all_gather_matmul takes MxKxN"),
        ({"shapes": "huge"}, r"shape 'huge' is neither a set \(tiny, .*\) nor sizes"),
        ({"shapes": "64x0"}, "has a size of 0"),
        ({"shapes": "60x64", "operations": "all_gather"}, "m=60 is not a multiple of 8; pass"),
        ({"shapes": "64x64x60", "operations": "all_gather_matmul"}, "n=60 is not a multiple of 8"),
        ({"shapes": "64x60x64", "operations": "matmul_all_reduce"}, "k=60 is not a multiple of 8"),
        ({"pieces": "one"}, "'one' are not like 1,2,4"),
    ],
)
def test_misuse(options, message):
    with pytest.raises((BenchmarkError, ValueError), match=message):
        run(**options)
