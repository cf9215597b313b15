"""The benchmark of several nodes: its versions compute the same, and it writes what it timed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from stretto.benchmarks import across_nodes
from stretto.benchmarks.cases.shapes import parse_shape
from stretto.benchmarks.peers import across_nodes_peers as peers

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
        *(peers.FLAT, peers.HIERARCHY, peers.ALONE),
        *(f"Stretto, {count} pieces" for count in (1, 2, 4)),
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
