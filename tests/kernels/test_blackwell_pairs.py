"""Pairs of blocks that make a tile together, in the simulator; nobody has run them on a GPU."""

from __future__ import annotations

import functools

import pytest
from blackwell_cases import (
    PAIR,
    group_derivatives,
    group_product,
    on_one,
    replacing,
    simulate,
)
from fused_cases import FORMS
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.engine.architectures import TILES
from stretto.kernels.fused import grouped_matmul
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import BLACKWELL, Machine
from stretto.kernels.problem.problem import Problem, Types

SIZES = 260, 72, 136
"""More rows than a pair makes at once, and columns that fit no tile."""
GROUPS = grouped_matmul.Config(tiles=PAIR)

pairs = functools.partial(simulate, tiles=PAIR, sizes=SIZES, core_count=5)
"""One multiprocessor stays without a neighbour."""


QUICK = "all_gather_matmul_k", "matmul_all_reduce"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FORMS]
)
def test_fused_matmuls(name):
    right, report = pairs(name, 2)
    assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("devices", range(2, 9))
@pytest.mark.parametrize("first", range(0, 20, 4))
@pytest.mark.timeout(600)
def test_fused_matmuls_in_many_orders(name, devices, first):
    for seed in range(first, first + 4):
        sizes = [(257, 8, 8), (130, 72, 136), (1, 136, 8)][seed % 3]
        right, report = pairs(name, devices, seed=seed, sizes=sizes)
        assert right and report.ok, f"seed {seed}: {report}"


def test_one_device():
    for seed in range(2):
        right, report = on_one(seed, 520, 192, 320, PAIR, core_count=4)
        assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_one_device_in_many_orders(seed):
    for tiles in (PAIR, TILES[BLACKWELL].tall):
        right, report = on_one(seed, 520, 192, 320, tiles, core_count=4)
        assert right and report.ok, str(report)


@pytest.mark.slow  # By one block: test_blackwell.py.
def test_rows_in_groups():
    """lhs is transposed in the gradient of rhs, and a tile without rows has no contraction."""
    group_product(0, transposed=True, config=GROUPS)
    group_derivatives(0, transposed=False, config=GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_rows_in_groups_in_many_orders(seed, transposed):
    group_product(seed, transposed, GROUPS)
    group_derivatives(seed, transposed, GROUPS)


# --- What pairs need ------------------------------------------------------------------------------


@pytest.fixture
def barriers(monkeypatch, traces_apart):
    """Leaves out the waits on the barriers of a name, or the arrivals at them."""
    return replacing(monkeypatch)


def several_tiles(seed: int = 1):
    """Two pairs, in which every barrier is taken several times."""
    return on_one(seed, 768, 192, 256, PAIR, core_count=4)


def test_without_a_bug_nothing_is_found():
    right, report = several_tiles()
    assert right and report.ok, str(report)


@pytest.mark.parametrize("name", ["full", "empty", "made", "drained"])
def test_a_wait_that_is_left_out_is_found(barriers, name):
    barriers("barrier_wait", name)
    try:
        _, report = several_tiles()
    except SimulationError as error:  # Too many arrivals, or nothing that can move.
        report = error.report
    assert report is not None and not report.ok


def test_both_blocks_must_say_that_they_have_drained(monkeypatch, barriers):
    """With a barrier of its own the first block overwrites the second's accumulator."""
    monkeypatch.setattr(
        plgpu,
        "ClusterBarrier",
        lambda collective_axes, leader_tracked, **options: plgpu.Barrier(**options),
    )
    _, report = several_tiles()
    assert report.kinds() == {"race"}, str(report)
    assert "totals" in str(report) and "plgpu.tcgen05_mma" in str(report)


@pytest.mark.parametrize("name", ["made", "empty"])
def test_both_blocks_must_be_told_of_a_commit(barriers, name):
    """One that reaches the first block alone leaves the second waiting."""
    barriers(
        "tcgen05_commit_arrive", name, lambda commit, barrier, collective_axis: commit(barrier)
    )
    with pytest.raises(DeadlockError, match=f"waits for barrier {name}"):
        several_tiles()


@pytest.mark.usefixtures("traces_apart")
@pytest.mark.parametrize("name", ["produced", "finished"])
def test_both_blocks_signal_their_part_of_a_tile(monkeypatch, name):
    wait = Semaphore.wait

    def one_fewer(self, value=1, **options):
        wait(self, value - (self.site.semaphore == name), **options)

    monkeypatch.setattr(Semaphore, "wait", one_fewer)
    _, report = pairs("matmul_all_reduce", 2, seed=1)
    assert report.kinds() & {"race", "after end", "semaphore not zero"}, str(report)


# --- Where they are taken -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "m", "blocks"),
    [
        ("all_gather_matmul", 4 * 512, 2),
        ("all_gather_matmul", 4 * 384, 1),
        ("all_gather_matmul_k", 4096, 2),
        ("matmul_reduce_scatter", 4 * 1000, 2),
        ("matmul_all_reduce", 4 * 128, 1),
        ("grouped_matmul", 8 * 1024, 2),
        ("grouped_matmul", 8 * 512, 1),
    ],
)
def test_a_default_is_a_pair_where_rows_fill_its_tiles(name, m, blocks):
    problem = Problem(
        operation=name,
        sizes=dict(m=m, k=4096, n=8192, g=8),
        types=Types(lhs="bfloat16", out="bfloat16"),
        devices=4,
        machine=Machine.of_kind("gpu", "NVIDIA B200"),
    )
    config = OPERATIONS[name].kernels[0].default(problem)
    config.check(problem)
    assert config.tiles.blocks == blocks


def test_a_pair_needs_two_multiprocessors():
    with pytest.raises(ValueError, match="clusters of 2 blocks need 2 multiprocessors, and a kern"):
        on_one(0, 256, 64, 128, PAIR, core_count=1)


def test_blocks_must_be_whole_clusters():
    with pytest.raises(ValueError, match="num_blocks=3 must be a multiple of cluster=2"):
        kernel.launch(lambda: None, name="odd", team=None, out_type=[], num_blocks=3, cluster=2)
