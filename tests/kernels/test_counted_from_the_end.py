"""Kernels whose devices are counted from the end, as where a job has several cliques."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import subjects
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P
from selection import slow
from subjects import SUBJECTS

import stretto as st
from stretto.distributed.devices import clique

# A copy, a sum, and each way of a fused matmul.
QUICK = ("all_to_all", "all_reduce", "all_gather_matmul", "matmul_reduce_scatter")


@pytest.fixture(autouse=True)
def several_cliques(monkeypatch, traces_apart):
    """The kernels think so; there is one, of all devices."""
    monkeypatch.setattr(clique, "are_several", lambda: True)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SUBJECTS])
@pytest.mark.parametrize(("shape", "axis"), [slow((3,), "x"), ((2, 2), "y")])
def test_results_are_the_same(name, shape, axis):
    subject, mesh = SUBJECTS[name], mesh_of(*shape)
    team = subjects.team_size(mesh, axis)
    shapes = subject.shapes(team, subject.sizes_of(team, 24, 72, 72))

    def body(seed):
        operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=True)
        out = subject.call(operands, axis, backend="pallas")
        return (out.astype(np.float32) != subject.exact(operands, axis)).sum()[None]

    with st.simulate(seed=3, core_count=2):
        wrong = jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False
            )
        )(0)
    assert not np.asarray(wrong).any()


def test_devices_are_lowered_in_that_order():
    other = clique.Clique(("x",), (3,), (4, 5, 6), (1, 1, 2)).reversed()
    assert (other.members, other.processes) == ((6, 5, 4), (2, 1, 1))
