"""Which calls on experts `auto` gives to kernels on two H200s: those of published models."""

from __future__ import annotations

import dataclasses

import pytest

import stretto as st
from stretto.kernels.choice import by_table, speed, tables
from stretto.kernels.collectives import counted_dispatch, dispatch, routed_dispatch
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.operations.expert_checks import room_for
from stretto.kernels.operations.expert_examples import MODELS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

H200, MULTIPROCESSORS = "NVIDIA H200", 132
TOKENS = sorted({*(1 << power for power in range(15)), 3, 5, 12, 90, 700, 3000, 6000, 12000})


def problem(operation: str, model: str, tokens: int, devices: int = 2, **others: int) -> Problem:
    """A call as a layer makes it: with room for the worst case."""
    d, f, experts, top_k = MODELS[model]
    known = dict(t=devices * tokens, d=d, n=2 * f, f=f, top_k=top_k, num_experts=experts)
    known["rows"] = devices * room_for(tokens, top_k, devices, None)
    sizes = {name: known[name] for name in OPERATIONS[operation].sizes} | others
    rhs = "float32" if operation == "expert_combine" else "int32"
    return Problem(
        operation=operation,
        sizes=sizes,
        types=Types(lhs="bfloat16", rhs=rhs, out="bfloat16"),
        devices=devices,
        machine=Machine.of_kind("gpu", H200),
    )


def chosen(problem: Problem):
    operation = OPERATIONS[problem.operation]
    return speed.faster(operation, operation.kernels[0], problem)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("operation", ["expert_dispatch", "expert_combine", "mixture_of_experts"])
def test_kernels_serve_all_numbers_of_tokens(operation, model):
    """At and between the tokens of the table's entries, and somewhat beyond."""
    by_xla = [
        tokens for tokens in TOKENS if chosen(problem(operation, model, tokens)).backend == "xla"
    ]
    assert not by_xla


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("operation", ["expert_dispatch", "mixture_of_experts"])
def test_kernels_make_the_tables(operation, model):
    """With the configuration of an entry, too, that has fewer tokens, or more."""
    d, _, experts, top_k = MODELS[model]
    # The dispatch of as many tokens of gpt-oss was timed before its kernel made the tables.
    before = model == "gpt-oss" and operation == "expert_dispatch"
    for tokens in [x for x in TOKENS if not (before and x >= 4096)]:
        config = chosen(problem(operation, model, tokens)).config
        config = config if isinstance(config, dispatch.Config) else config.dispatch
        sizes = dict(num_experts=experts, width=d, itemsize=2)
        sizes["rows"] = room_for(tokens, top_k, 2, None)
        sizes["num_blocks"] = config.num_blocks
        with st.simulate(core_count=MULTIPROCESSORS):
            few = routed_dispatch.obstacle(tokens, top_k, 2, **sizes)
            many = counted_dispatch.obstacle(tokens, top_k, 2, **sizes)
        assert (config.tables and not few) or (config.counted and not many), (tokens, few, many)


def test_room_for_rows_does_not_matter():
    """A call has room for the worst case, and an entry as many rows as choices."""
    (entry,) = [
        x
        for x in tables.table_for(H200).entries
        if x.op == "expert_combine" and x.sizes["t"] == 16384 and x.sizes["d"] == 2048
    ]
    asked = problem("expert_combine", "qwen3-30b", 8192)
    assert entry.sizes["rows"] != asked.sizes["rows"]
    assert entry.distance(asked) == 0
    assert "measured" in chosen(asked).reason


def test_other_layers_are_not_told_from_these():
    """What was timed at four layers says nothing of one far from all, nor of four devices."""
    far = problem("expert_dispatch", "qwen3-30b", 8192, d=256, top_k=1, num_experts=16)
    assert chosen(far).backend == "xla"
    assert chosen(problem("expert_dispatch", "qwen3-30b", 8192, devices=4)).backend == "xla"


def test_a_layer_is_decided_by_its_moves(monkeypatch):
    """Where no table has it: by all of them."""
    operation = OPERATIONS["mixture_of_experts"]
    asked = problem("mixture_of_experts", "deepseek-v3", 64)
    assert by_table.look_up(operation.kernels[0], asked) is None
    assert "expert_dispatch: the fused kernel" in chosen(asked).reason
    whole = tables.table_for(H200)
    for op, left in (("expert_dispatch", "xla"), ("expert_combine", "xla"), ("", "pallas")):
        slow = [
            dataclasses.replace(x, fused_us=2 * x.xla_us) if x.op == op else x
            for x in whole.entries
        ]
        changed = dataclasses.replace(whole, entries=tuple(slow))
        monkeypatch.setattr(tables, "table_for", lambda kind, table=changed: table)
        assert chosen(asked).backend == left
