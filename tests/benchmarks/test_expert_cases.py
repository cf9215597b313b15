"""Benchmarks of a mixture of experts: routings, floors, and the plan of XLA's ragged exchange."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.benchmarks.cases import floors
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import figures
from stretto.benchmarks.peers import expert_peers
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.kernels.operations import OPERATIONS


def case_of(name: str, model: str = "qwen3-30b", devices: int = 2, **changes) -> Case:
    operation = OPERATIONS[name]
    sizes = operation.examples.shapes(model, devices)[-1]
    found = Case(operation=operation, sizes=sizes, dtype="bfloat16", devices=devices)
    return dataclasses.replace(found, **changes)


def test_each_case_comes_with_each_routing_that_its_operation_has():
    sweep = Sweep(
        kernels=("expert_dispatch", "expert_combine"), shapes=("mixtral",), values=("", "zipf")
    )
    sweep.check()
    cases = [item.case for item in expand([sweep], 2, on_gpu=False)]
    drawn = [(case.operation.name, case.sizes["t"], case.values) for case in cases]
    for tokens in (1, 64, 1024, 8192, 16384):
        assert ("expert_dispatch", 2 * tokens, "zipf") in drawn
        assert ("expert_combine", 2 * tokens, "") in drawn
    assert ("expert_combine", 2, "zipf") not in drawn
    assert len({case.key for case in cases}) == len(cases)
    skewed = case_of("expert_dispatch", values="zipf")
    assert figures.begin(skewed, 1).key == skewed.key and "zipf" in str(skewed)
    with pytest.raises(BenchmarkError, match="values 'no' is not one of tensor, zipf"):
        Sweep(values=("no",)).check()


def test_zipf_makes_the_first_experts_the_likely_ones():
    for values in ("", "zipf"):
        draw = case_of("expert_dispatch", values=values).operands[1].draw
        counts = np.bincount(np.asarray(draw(jax.random.key(0))).reshape(-1), minlength=128)
        assert counts.sum() == 8192 * 8
        assert (counts[:8].mean() > 4 * counts[-64:].mean()) == bool(values)


def test_floors_of_moving_alone():
    """Qwen3-30B on 2: 33 MB over the link, 65 MB read and 268 MB written."""
    case = case_of("expert_dispatch")
    assert floors.communication_floor(case) == pytest.approx(95.5, rel=0.02)
    assert floors.memory_floor(case) == pytest.approx((268.4 + 66.8) / 4, rel=0.02)
    assert floors.floor(case, None) == floors.communication_floor(case)
    # Of the 28 pairs of experts 6 are on the own device, to which nothing crosses.
    crosses = 8192 * (1 - 6 / 28) * 4096 * 2
    few = case_of("expert_dispatch", "mixtral")
    assert floors.communication_floor(few) == pytest.approx(crosses / 350e3, rel=1e-3)
    alone = case_of("expert_dispatch", "mixtral", devices=1)
    assert floors.floor(alone, None) == floors.memory_floor(alone) > 0


@pytest.mark.parametrize("chunks", expert_peers.CHUNKS)
def test_the_plan_of_a_ragged_exchange(chunks):
    """Carried out by numpy, since JAX has no such exchange on a CPU: there, and back."""
    devices, experts, tokens, top_k = 2, 8, 6, 3
    index = np.random.default_rng(0).integers(0, experts, (devices * tokens, top_k))
    program = jax.shard_map(
        lambda i: jax.tree.map(lambda y: y[None], expert_peers.plan(i, ("x",), experts, chunks)),
        mesh=Mesh(np.array(jax.devices()[:devices]), ("x",)),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    plan = jax.tree.map(np.asarray, jax.jit(program)(jnp.asarray(index, jnp.int32)))
    chunks_each = plan.sizes.shape[1] // devices

    def exchanged(sent, here, sizes, there, rows):
        came = np.full((devices, rows), -1)
        for source in range(devices):
            for i, (at, size, to) in enumerate(
                zip(here[source], sizes[source], there[source], strict=True)
            ):
                came[i // chunks_each, to : to + size] = sent[source][at : at + size]
        return came

    entries = np.arange(index.size)
    own = entries.reshape(devices, -1)
    sent = [own[d][plan.order[d]] for d in range(devices)]
    came = exchanged(sent, plan.here, plan.sizes, plan.there, index.size)
    for device in range(devices):
        held = np.arange(experts).reshape(devices, -1)[device]
        wanted = np.concatenate([np.flatnonzero(index.reshape(-1) == e) for e in held])
        np.testing.assert_array_equal(came[device, : len(wanted)], wanted)
        assert plan.group_sizes[device].sum() == len(wanted)
    returned = exchanged(came, plan.came_to, plan.coming, plan.back, tokens * top_k)
    np.testing.assert_array_equal(returned, sent)
