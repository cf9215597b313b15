"""The kernels with the main loop of Blackwell, in the simulator; nobody has run them on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import fused_cases as cases
import jax
import jax.numpy as jnp
import pytest
from blackwell_cases import (
    CONFIG,
    SMALL,
    config_of,
    group_derivatives,
    group_product,
    on_one,
    replacing,
    simulate,
)
from fused_cases import BF16
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.choice import tables
from stretto.kernels.engine.blackwell.tile_config import TileConfig

NAMES = [*cases.FORMS]
QUICK = ("all_gather_matmul", "matmul_reduce_scatter")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in NAMES])
def test_fused_matmuls(name):
    """The kernel's own choice of tiles, on sizes that fit none."""
    right, report = simulate(name, 2)
    assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", range(2, 9))
@pytest.mark.parametrize("first", range(0, 20, 4))
@pytest.mark.timeout(600)
def test_fused_matmuls_in_many_orders(name, devices, first):
    for seed in range(first, first + 4):
        tiles = SMALL if seed % 2 else None
        sizes = [(65, 72, 136), (63, 8, 64), (129, 64, 8)][seed % 3]
        right, report = simulate(name, devices, seed=seed, tiles=tiles, sizes=sizes)
        assert right and report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("tiles", [TileConfig(), SMALL])
def test_one_device(tiles):
    right, report = on_one(0, 264, 192, 640, tiles)
    assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_one_device_in_many_orders(seed):
    for tiles in (SMALL, TileConfig(tile_n=192, num_stages=2, store_buffers=3)):
        right, report = on_one(seed, 264, 192, 640, tiles)
        assert right and report.ok, str(report)


# --- Rows in groups -------------------------------------------------------------------------------


def test_rows_in_groups():
    group_product(0, transposed=False)
    group_derivatives(0, transposed=True)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_rows_in_groups_in_many_orders(seed, transposed):
    config = CONFIG if seed % 2 else None
    group_product(seed, transposed, config)
    group_derivatives(seed, transposed, config)


# --- Each row of the main loop's tables is needed -------------------------------------------------

BARRIERS = ("full", "empty", "made", "drained", "filled", "free", "loaded", "added")


@pytest.fixture
def barriers(monkeypatch, traces_apart):
    """Leaves out the waits on the barriers of a name, or the arrivals at them."""
    return replacing(monkeypatch)


def adding(seed: int = 1):
    """A kernel with all of the barriers, in which every one is taken several times."""
    return simulate(
        "matmul_reduce_scatter", 2, seed=seed, tiles=SMALL, sizes=(128, 96, 192), core_count=2
    )


def test_without_a_bug_nothing_is_found():
    right, report = adding()
    assert right and report.ok, str(report)


@pytest.mark.parametrize("name", BARRIERS)
def test_a_wait_that_is_left_out_is_found(barriers, name):
    barriers("barrier_wait", name)
    try:
        _, report = adding()
    except SimulationError as error:  # Too many arrivals, or nothing that can move.
        report = error.report
    assert report is not None and not report.ok


@pytest.mark.parametrize("name", ["drained", "filled", "free", "added"])
def test_an_arrival_that_is_left_out_is_a_deadlock(barriers, name):
    barriers("barrier_arrive", name)
    with pytest.raises(DeadlockError, match=f"waits for barrier {name}"):
        adding()


@pytest.mark.parametrize("name", ["made", "empty"])
def test_a_commit_that_is_left_out_is_a_deadlock(barriers, name):
    barriers("tcgen05_commit_arrive", name)
    with pytest.raises(DeadlockError, match=f"waits for barrier {name}"):
        adding()


@pytest.mark.parametrize("function", ["wait_load_tmem", "commit_smem"])
def test_another_step_that_is_left_out_is_found(monkeypatch, barriers, function):
    monkeypatch.setattr(plgpu, function, lambda: None)
    _, report = adding()
    found = {"wait_load_tmem": "race", "commit_smem": "uncommitted store"}[function]
    assert found in report.kinds(), str(report)


@pytest.mark.usefixtures("traces_apart")
def test_a_tile_without_a_contraction_needs_its_zeros(monkeypatch):
    from stretto.kernels.engine.blackwell.accumulators import Accumulators

    monkeypatch.setattr(Accumulators, "clear", lambda self, half, columns: None)
    with pytest.raises(SimulationError, match="uninitialised"):
        group_product(0, transposed=False)


# --- What may be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tile_m=256), "tile_m=256 must be 128: the 128 lanes of tensor memory, in 1 block."),
        (dict(blocks=2), "tile_m=128 must be 256: the 128 lanes of tensor memory, in 2 blocks."),
        (dict(blocks=3), "blocks=3 must be 1, or 2 for a pair"),
        (dict(blocks=2, tile_m=256, tile_n=192), "tile_n=192 must be 128 or 256: each block of a"),
        (dict(tile_n=512), "tile_n=512 must be 64, 128, 192 or 256"),
        (dict(tile_k=32), "tile_k=32 must be 64, or 128 of 8 bits"),
        (dict(num_stages=1), "num_stages=1 must be at least 2"),
    ],
)
def test_tiles_that_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        TileConfig(**changes).check()


def test_tiles_of_the_other_architecture():
    x = jnp.zeros((128, 128), BF16)
    program = cases.mapped(
        "matmul_reduce_scatter", cases.mesh_of(2), config=config_of("matmul_reduce_scatter", SMALL)
    )
    with st.simulate(), pytest.raises(ValueError, match="are for sm_100, and cpu is sm_90; pass"):
        jax.eval_shape(program, x, x)


def test_what_a_simulation_chooses():
    """The tiles of the target, and its multiprocessors."""
    found = {}

    def call(x):
        for target in ("h100", "b200"):
            with st.simulate(target=target):
                found[target] = st.explain(st.all_gather_matmul, x, x, "x")
        return x

    program = jax.shard_map(
        call, mesh=cases.mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    jax.eval_shape(program, jnp.zeros((128, 128), BF16))
    assert isinstance(found["b200"].config.tiles, TileConfig)
    assert not isinstance(found["h100"].config.tiles, TileConfig)
    machines = [found[target].problem.machine for target in ("h100", "b200")]
    assert [m.architecture for m in machines] == ["sm_90", "sm_100"]
    assert [m.multiprocessors for m in machines] == [132, 148]


# --- What is said of it ---------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "how"


@pytest.mark.parametrize("page", ["blackwell.md", "architecture.md"])
def test_the_pages_say_that_it_was_never_run(page):
    """Until there is a table of such a card, which only a run on one writes."""
    assert not tables.exists("NVIDIA B200"), "take out what the pages say, and this test"
    text = (DOCS / page).read_text()
    assert re.search(r"\*\*(None of it was ever run on one|was never run on hardware)\*\*", text)
