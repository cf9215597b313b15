"""Kernels that start by counters leave room for XLA's collectives, or end and so make it."""

from __future__ import annotations

import fused_cases as cases
import jax
import numpy as np
import pytest
from fused_cases import BF16, F32

import stretto as st
from stretto.distributed import residency
from stretto.kernels.collectives import dispatch
from stretto.kernels.engine.hopper.tile_config import NARROWEST
from stretto.kernels.engine.orders import OwnersOrder, ShardOrder
from stretto.kernels.fused import matmul_all_reduce, matmul_reduce_scatter

pytestmark = pytest.mark.usefixtures("traces_apart")

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
LAST = matmul_reduce_scatter.Config(tiles=NARROWEST)
EACH = {
    SCATTER: LAST,
    REDUCE: matmul_all_reduce.Config(tiles=NARROWEST, own_last=True),
}
CORES = 6
SIZES = 384, 64, 256  # Of a device: 12 tiles for the peer and 12 own ones.


@pytest.fixture
def few_are_lacking(monkeypatch):
    """A collective takes one of a few multiprocessors."""
    monkeypatch.setattr(residency, "LACKING", 1)


def program(name, config, devices=2):
    return jax.jit(cases.mapped(name, cases.mesh_of(devices), config=config, out_dtype=F32))


def operands(name, devices=2):
    return cases.operands(*cases.whole(name, devices, *SIZES))


def starts_by_counters(name, config, devices=2, cores=CORES):
    """Whether the kernel, which fills the device, starts without XLA's barrier."""
    lhs, rhs = operands(name, devices)
    with st.simulate(core_count=cores):
        traced = jax.make_jaxpr(program(name, config, devices))(lhs.astype(BF16), rhs.astype(BF16))
    return "sem_name=opening" in str(traced)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("resident", [CORES, CORES - 1])
def test_a_reduction_fills_the_device(name, resident, few_are_lacking):
    """Also if a block of it starts only once another one has ended."""
    call, (lhs, rhs) = program(name, EACH[name]), operands(name)
    assert starts_by_counters(name, EACH[name])
    for seed in range(3):
        with st.simulate(seed=seed, core_count=CORES, resident_blocks=resident) as report:
            out = np.asarray(call(lhs.astype(BF16), rhs.astype(BF16)))
        assert np.array_equal(out, lhs @ rhs) and report.ok, str(report)


def test_own_tiles_in_between_need_the_barrier(few_are_lacking):
    config = matmul_all_reduce.Config(tiles=NARROWEST, own_last=False)
    assert not starts_by_counters(REDUCE, config)


def test_one_of_several_teams_keeps_the_barrier(few_are_lacking):
    """Its peers may be late because of devices that are not of the team."""
    call = jax.jit(cases.mapped(SCATTER, cases.mesh_of(2, 2), config=LAST, out_dtype=F32))
    lhs, rhs = operands(SCATTER)
    with st.simulate(core_count=CORES):
        traced = jax.make_jaxpr(call)(lhs.astype(BF16), rhs.astype(BF16))
    assert "sem_name=opening" not in str(traced)


def test_on_many_devices_all_blocks_may_be_held_up(few_are_lacking):
    assert starts_by_counters(SCATTER, LAST)
    assert not starts_by_counters(SCATTER, LAST, devices=8)


def test_then_a_sixteenth_is_not_enough_room(few_are_lacking, monkeypatch):
    monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", "1")
    monkeypatch.setattr(residency, "LACKING", 2)
    assert not starts_by_counters(SCATTER, LAST, devices=8, cores=16)
    monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", "4")
    assert starts_by_counters(SCATTER, LAST, devices=8, cores=16)


def test_gathers_that_fill_the_device_keep_the_barrier(few_are_lacking):
    assert not starts_by_counters("all_gather_matmul", cases.IN_SHARDS)


@pytest.mark.parametrize(("devices", "columns", "shared", "lag", "held_up"), [
    (2, 1024, 0, None, 1), (4, 1024, 0, None, 3), (2, 1024, 8, None, 3), (2, 1024, 0, 3, None),
    (2, 512, 0, 3, 1),
])  # fmt: skip
def test_how_many_blocks_one_holds_up(devices, columns, shared, lag, held_up):
    shard = ShardOrder(1024, columns, NARROWEST, steps=devices)
    assert OwnersOrder(shard, devices, 132, lag=lag).held_up(shared) == held_up


@pytest.mark.parametrize(("lag", "most"), [(None, 1), (2, 8)])
def test_blocks_that_are_held_up_are_counted(lag, most):
    """Those that wait, themselves or by another, for a tile of a peer's block that does not run."""
    blocks, size = 8, 2
    order = OwnersOrder(ShardOrder(128 * 8, 64 * 9, NARROWEST, steps=size), size, blocks, lag=lag)
    tiles = [order.locate(i) for i in range(order.count())]
    place = {(t.step, t.m, t.n): i for i, t in enumerate(tiles)}

    def ends(device, index, lacking, seen):
        """Whether the tile at `index` of a device's list is made, where the peer lacks a block."""
        if device == 1 and index % blocks == lacking:
            return False
        if (device, index) in seen:
            return seen[device, index]
        tile = tiles[index]
        before = index < blocks or ends(device, index - blocks, lacking, seen)
        made = before and (
            tile.step == 0 or ends(1 - device, place[0, tile.m, tile.n], lacking, seen)
        )
        seen[device, index] = made
        return made

    found = []
    for lacking in range(blocks):
        seen = {}
        last = range(order.count() - blocks, order.count())
        found.append(sum(not ends(0, index, lacking, seen) for index in last))
    assert max(found) == most


@pytest.mark.parametrize(("num_blocks", "held_up", "end"), [
    (132, 1, True), (132, 3, True), (132, 4, False), (43, 1, True), (42, 1, False),
])  # fmt: skip
def test_how_many_may_be_held_up(num_blocks, held_up, end):
    assert residency.most_blocks_end(num_blocks, held_up) is end


def test_blocks_that_all_wait_leave_a_quarter():
    with st.simulate(core_count=132):
        assert residency.most_blocks_beside_others(all_wait=True) == 99
        assert residency.leaves_room(99, all_wait=True)
        assert residency.leaves_room(124)
        assert not residency.leaves_room(100, all_wait=True)


def test_a_dispatch_whose_blocks_all_wait_starts_by_the_barrier():
    index = np.random.default_rng(0).integers(0, 8, (2 * 512, 2)).astype(np.int32)
    x = np.ones((2 * 512, 64), np.float32)

    def call(x, index):

        config = dispatch.Config(counted=True)
        return st.expert_dispatch(x, index, "x", num_experts=8, config=config, backend="pallas")[0]

    mapped = jax.shard_map(
        call,
        mesh=cases.mesh_of(2),
        in_specs=(cases.P("x"), cases.P("x")),
        out_specs=cases.P("x"),
        check_vma=False,
    )
    with st.simulate(core_count=16):
        traced = str(jax.make_jaxpr(mapped)(x, index))
    assert "expert_dispatch_counted" in traced and "grid=(16,)" in traced
    assert "sem_name=opening" not in traced
