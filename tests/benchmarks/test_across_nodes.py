"""The benchmark of several nodes: its versions compute the same, and it writes what it timed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from stretto.benchmarks import across_nodes
from stretto.benchmarks import across_nodes_peers as peers
from stretto.benchmarks.shapes import parse_shape

OPERATIONS = tuple(across_nodes.DEFAULT_SHAPES)


@pytest.mark.parametrize("op", OPERATIONS)
def test_versions_agree(op):
    """Also in the order of rows, on two nodes of four."""
    mesh = across_nodes.mesh_of(2)
    shape = parse_shape("64x64x64" if "matmul" in op else "64x64", op)
    out = {}
    for name, body, blocks in peers.versions(op, shape, mesh.size, "xla", [1]):
        if name == peers.ALONE:
            continue
        operands = across_nodes.operands_of(blocks, mesh)
        program = jax.shard_map(
            body, mesh=mesh, in_specs=P(peers.BOTH), out_specs=P(peers.BOTH), check_vma=False
        )
        out[name] = np.asarray(jax.jit(program)(*operands), np.float32)
    flat = out.pop(peers.FLAT)
    assert len(out) == 2 and np.abs(flat).max() > 1
    for found in out.values():
        np.testing.assert_allclose(found, flat, rtol=0.03, atol=0.03 * np.abs(flat).max())


def test_what_it_writes(tmp_path, capsys):
    path = tmp_path / "across.json"
    across_nodes.main(
        across_nodes.Options(
            operations="all_gather_matmul", shapes="64x64x64", rounds=1, backend="xla", json=path
        )
    )
    written = json.loads(path.read_text())
    assert written["devices_per_node"] == 4 and written["machine"]["num_devices"] == 8
    (result,) = written["results"]
    assert result["versions"].keys() == {
        *(peers.FLAT, peers.HIERARCHY, peers.ALONE, "Stretto, 1 pieces"),
    }
    for name, found in result["versions"].items():
        assert 0 < found["p10"] <= found["median"] <= found["p90"]
        assert ("difference" in found) == (name != peers.ALONE)
    assert capsys.readouterr().out.startswith("all_gather_matmul 64x64x64 (us): XLA flat ")


def test_what_cannot_be_compiled_is_told(capsys):
    """And does not keep the others from being timed."""
    options = across_nodes.Options(
        operations="all_gather", shapes="64x64", rounds=1, backend="pallas", pieces="1"
    )
    across_nodes.main(options)
    assert "Stretto, 1 pieces: BackendUnavailableError: all_gather:" in capsys.readouterr().out


def test_shapes_of_both_forms_go_to_the_operations_that_take_them():
    options = across_nodes.Options(
        operations="all_gather_matmul,all_reduce", shapes="64x32x64,256x64,tiny"
    )
    work = [(op, str(shape)) for op, shape in across_nodes.problems(options, 8, True)]
    matmuls = ["64x32x64", "256x128x128", "128x256x192"]
    collectives = ["256x64", "64x32", "256x128"]
    assert work == [
        *(("all_gather_matmul", shape) for shape in matmuls),
        *(("all_reduce", shape) for shape in collectives),
    ]


def test_every_operation_has_shapes_of_its_own_small_ones_on_cpus():
    options = across_nodes.Options()
    largest = {
        on_gpu: max(shape.m for _, shape in across_nodes.problems(options, 8, on_gpu))
        for on_gpu in (True, False)
    }
    assert largest == {True: 16384, False: 256}
    for on_gpu in largest:
        found = [op for op, _ in across_nodes.problems(options, 8, on_gpu)]
        assert tuple(dict.fromkeys(found)) == OPERATIONS


def test_on_cpus_it_rehearses_without_being_told(capsys, tmp_path):
    path = tmp_path / "across.json"
    across_nodes.main(across_nodes.Options(operations="all_gather", json=path))
    (result,) = json.loads(path.read_text())["results"]
    assert result["shape"] == "256x128"
    assert all("median" in version for version in result["versions"].values()), result


@pytest.mark.parametrize(
    ("operations", "shapes", "error"),
    [
        ("all_gather,gather", "", r"operations=gather must be among all_gather_matmul,"),
        ("all_gather", "64x64,64x64x64", r"shape '64x64x64' has 3 sizes; all_gather takes MxN"),
        ("all_gather_matmul", "64x64", r"'64x64' has 2 sizes; all_gather_matmul takes MxKxN"),
        ("all_gather", "huge", r"shape 'huge' is neither a set \(tiny, .*\) nor sizes"),
        ("all_gather", "64x0", r"has a size of 0"),
        ("all_gather", "60x64", r"all_gather 60x64: m=60 must be a multiple of the job's 8"),
        ("all_gather_matmul", "64x64x60", r"n=60 must be a multiple"),
        ("matmul_all_reduce", "64x60x64", r"k=60 must be a multiple"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is(operations, shapes, error):
    options = across_nodes.Options(operations=operations, shapes=shapes)
    with pytest.raises(ValueError, match=error):
        across_nodes.main(options)


def test_nodes_must_divide_the_devices():
    with pytest.raises(ValueError, match="nodes=3 must divide the 8 devices"):
        across_nodes.mesh_of(3)


def test_calls_are_made_one_after_another():
    """All of them, the next on what the last one's result depends on."""
    calls = []

    def body(x):
        jax.debug.callback(lambda: calls.append(1), ordered=False)
        return x + 1

    token, out = jax.jit(across_nodes.looped(body, 5))(jnp.zeros((1, 1)), jnp.ones((2, 2)))
    jax.effects_barrier()
    assert len(calls) == 5 and float(token[0, 0]) == 10 and (out == 2).all()
