"""The benchmark of several nodes: its versions compute the same, and it writes what it timed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench_cases import case_of

from stretto.benchmarks import across_nodes
from stretto.benchmarks.cases.meshes import mesh_of_nodes
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.peers.across_nodes import HIERARCHICAL, peers_across_nodes
from stretto.benchmarks.peers.peers import MATMUL
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.distributed import settings
from stretto.kernels.operations import OPERATIONS

LABELS = ["XLA flat", "XLA hierarchical", "matmul alone"]


@pytest.mark.parametrize("operation", HIERARCHICAL, ids=lambda operation: operation.name)
def test_versions_agree(operation):
    """Also in the order of rows, on two nodes of four."""
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
    between = [name for name, one in OPERATIONS.items() if one.between_nodes is not None]
    assert across_nodes.Options().operations.split(",") == between
    assert {operation.name for operation in HIERARCHICAL} == set(between)


def run(**options):
    across_nodes.main(across_nodes.Options(rounds=1, **options))


def test_what_it_writes(tmp_path, capsys):
    path = tmp_path / "across.json"
    run(operations="all_gather_matmul", shapes="64x64x64", backend="xla", json=path)
    written = json.loads(path.read_text())
    assert written["devices_per_node"] == 4 and written["machine"]["num_devices"] == 8
    (result,) = written["results"]
    versions = result["versions"]
    assert list(versions) == [*LABELS, *(f"Stretto, {count} pieces" for count in (1, 2, 4))]
    for name, found in versions.items():
        assert 0 < found["p10"] <= found["median"] <= found["p90"]
        assert ("difference" in found) == (name not in ("XLA flat", "matmul alone"))
    assert capsys.readouterr().out.startswith("all_gather_matmul 64x64x64 (us): XLA flat ")


def test_each_operation_takes_the_shapes_that_are_its_own(capsys):
    run(
        operations="all_gather,matmul_all_reduce",
        shapes="64x64,64x64x64",
        backend="xla",
        pieces="1",
    )
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == [
        "all_gather 64x64",
        "matmul_all_reduce 64x64x64",
    ]


def test_what_cannot_be_compiled_is_told(capsys):
    """And does not keep the others from being timed."""
    run(operations="all_gather", shapes="64x64,63x64", backend="pallas", pieces="1")
    first, second = capsys.readouterr().out.splitlines()
    assert "Stretto, 1 pieces: all_gather: backend='pallas' cannot serve this call" in first
    assert first.startswith("all_gather 64x64 (us): XLA flat ")
    assert "XLA flat: m=63 is not a multiple of 8" in second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 3}, "nodes=3 must divide the 8 devices"),
        ({"operations": "gather"}, "kernel 'gather' is not one of"),
        ({"shapes": "64x64x64", "operations": "all_gather"}, "all_gather takes MxN"),
        ({"pieces": "one"}, "'one' are not like 1,2,4"),
    ],
)
def test_misuse(options, message):
    with pytest.raises((BenchmarkError, ValueError), match=message):
        run(**options)
