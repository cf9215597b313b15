"""The attention kernel as a peer: split between devices, and alone on one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import mesh_of

import stretto as st
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing.tune import configs_for
from stretto.kernels.choice import by_table, config_data, tables
from stretto.kernels.fused.attention_config import Config
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.operations.attention_options import Config as Ways
from stretto.kernels.problem.machine import Machine

SIZES = dict(b=1, t=256, kv_t=256, heads=2, kv_heads=2, dim=64, masking=2, passes=1)


def case(**changes):
    record = OPERATIONS["context_parallel_attention"]
    return Case(operation=record, sizes=SIZES | changes, dtype="bfloat16", devices=2)


def test_each_configuration_is_offered():
    found = PEERS["attention-fused"].candidates_for(case(), mesh_of(2))
    problem = case().problem(Machine.of_mesh())
    assert [one.config for one in found] == [str(one) for one in Config.candidates(problem)]
    assert all(one.operands == case().operands for one in found)


@pytest.mark.parametrize(
    ("kind", "changes", "tried"),
    [
        ("NVIDIA H200", {}, 2),
        ("NVIDIA H200", dict(passes=2), 4),  # By cuDNN's derivative, too.
        ("NVIDIA H200", dict(dim=96), 0),
        ("NVIDIA H200", dict(t=192, kv_t=192), 0),  # Chunks that are no multiples of its blocks.
        ("NVIDIA B200", {}, 0),
    ],
)
def test_the_tuner_tries_both_kernels_and_the_table_tells_them_apart(kind, changes, tried):
    one, machine = case(**dict(t=512, kv_t=512) | changes), Machine.of_kind("gpu", kind)
    found, kernels = configs_for(one, machine), one.operation.kernels
    assert [type(config) for config in found] == [Ways] * 2 + [Config] * tried
    for config in found:
        entry = tables.Entry(
            op=one.operation.name,
            sizes=one.problem(machine).sizes,
            dtype="bfloat16",
            devices=2,
            fused_us=1.0,
            xla_us=1.0,
            config=config_data.to_data(config),
        )
        is_of = [by_table.is_of(entry, kernel, one.problem(machine)) for kernel in kernels]
        assert is_of == [isinstance(config, kernel.Config) for kernel in kernels]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_the_kernels_alone_have_a_devices_share_of_heads(monkeypatch, passes):
    monkeypatch.setattr(Machine, "of_mesh", lambda: Machine.of_kind("gpu", "NVIDIA H200"))
    first, *_ = PEERS["own-attention"].candidates_for(case(passes=passes), mesh_of(2))
    assert [operand.shape for operand in first.operands] == [(1, 256, 1, 64)] * 3
    q, k, v = (
        jax.random.normal(key, (1, 256, 1, 64), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 3)
    )
    with st.simulate(core_count=2):
        found = jax.tree.leaves(jax.jit(first.body)(q, k, v))

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    right, pull = jax.vjp(attend, *(x.astype(jnp.float32) for x in (q, k, v)))
    right = [right, *pull(right)][: len(found)]
    assert len(found) == (4 if passes == 2 else 1)
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=2e-2)


def test_where_it_is_not_timed():
    with pytest.raises(UnavailableError, match="runs on GPUs"):
        PEERS["own-attention"].candidates_for(case(), mesh_of(2))
