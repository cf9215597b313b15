"""The kernels with the main loop of Blackwell, in the simulator; nobody has run them on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32, whole_numbers
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.engine.blackwell.matmul import Matmul
from stretto.kernels.engine.blackwell.tile_config import TileConfig
from stretto.kernels.fused import grouped_matmul
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import OPERATIONS as RECORDS

SMALL = TileConfig(tile_n=64, num_stages=2, store_buffers=1)
NAMES = [*cases.FORMS]


def config_of(name: str, tiles: TileConfig) -> Any:
    kernel = RECORDS[name].kernels[0]
    return dataclasses.replace(kernel.Config(), tiles=tiles)


def simulate(name, devices, *, seed=0, tiles=None, sizes=(65, 72, 136), **settings):
    """Runs an operation; returns whether its numbers are right, and the report."""
    settings = dict(seed=seed, core_count=3, check_hardware=seed == 0) | settings
    config = None if tiles is None else config_of(name, tiles)
    lhs, rhs = cases.operands(*cases.whole(name, devices, *sizes), seed=seed)
    program = jax.jit(cases.mapped(name, cases.mesh_of(devices), out_dtype=F32, config=config))
    with st.simulate(target="b200", on_finding="record", **settings) as report:
        out = np.asarray(program(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)))
    return np.array_equal(out, lhs @ rhs), report


@pytest.mark.parametrize("name", NAMES)
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


def on_one(seed: int, m: int, k: int, n: int, tiles: TileConfig, **settings: Any):
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, k, n)
    settings = dict(seed=seed, core_count=2, target="b200") | settings
    with st.simulate(on_finding="record", **settings) as report:
        call = functools.partial(local_matmul, out_dtype=F32, config=tiles)
        out = np.asarray(jax.jit(call)(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)))
    return np.array_equal(out, lhs @ rhs), report


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

SIZES = (1, 7, 0, 150, 60)
CONFIG = grouped_matmul.Config(tiles=SMALL)


def groups_of(seed: int, transposed: bool):
    m, k, n = 300, 72, 136
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, len(SIZES), k, n)
    given = rhs.swapaxes(1, 2) if transposed else rhs
    arrays = [jnp.asarray(lhs, BF16), jnp.asarray(given, BF16), jnp.array(SIZES, jnp.int32)]
    want, first = np.zeros((m, n), np.float32), 0
    for size, matrix in zip(SIZES, rhs, strict=True):
        want[first : first + size] = lhs[first : first + size] @ matrix
        first += size
    return arrays, want


def group_product(seed: int, transposed: bool, config: Any = CONFIG):
    arrays, want = groups_of(seed, transposed)
    call = functools.partial(
        st.grouped_matmul, rhs_transposed=transposed, out_dtype=F32, config=config
    )
    with st.simulate(target="b200", seed=seed, core_count=3, check_hardware=seed == 0) as report:
        out = np.asarray(jax.jit(call)(*arrays))
    assert report.launches == 1
    np.testing.assert_array_equal(out, want)


def group_derivatives(seed: int, transposed: bool, config: Any = CONFIG):
    arrays, _ = groups_of(seed, transposed)

    def loss(x, y, sizes, **options):
        out = st.grouped_matmul(x, y, sizes, rhs_transposed=transposed, out_dtype=F32, **options)
        return jnp.sum(out)

    derivatives = jax.grad(loss, (0, 1))
    fused_ones = jax.jit(functools.partial(derivatives, config=config))
    with st.simulate(target="b200", seed=seed, core_count=3, check_hardware=False) as report:
        fused = fused_ones(*arrays)
        jax.block_until_ready(fused)
    assert report.launches == 2
    wanted = jax.jit(functools.partial(derivatives, backend="xla"))(*arrays)
    for got, want in zip(fused, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


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
def barriers(monkeypatch) -> Callable[[str, str], None]:
    """Leaves out the waits on the barriers of a name, or the arrivals at them."""
    jax.clear_caches()  # Nothing that was traced with a bug is used without it.
    named: dict[str, Any] = {}
    roles = Matmul.roles

    def remember(self, block, gates, scratch):
        named.update(scratch)
        return roles(self, block, gates, scratch)

    monkeypatch.setattr(Matmul, "roles", remember)

    def leave_out(function: str, name: str) -> None:
        original = getattr(plgpu, function)

        def maybe(barrier, *args, **kwargs):
            if getattr(barrier, "ref", barrier) is not named.get(name):
                original(barrier, *args, **kwargs)

        monkeypatch.setattr(plgpu, function, maybe)

    yield leave_out
    jax.clear_caches()


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


def test_a_tile_without_a_contraction_needs_its_zeros(monkeypatch):
    from stretto.kernels.engine.blackwell.accumulators import Accumulators

    jax.clear_caches()
    monkeypatch.setattr(Accumulators, "clear", lambda self, half, columns: None)
    with pytest.raises(SimulationError, match="uninitialised"):
        group_product(0, transposed=False)
    jax.clear_caches()


# --- What may be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tile_m=256), "tile_m=256 must be 128: the lanes of tensor memory"),
        (dict(tile_n=512), "tile_n=512 must be 64, 128, 192 or 256"),
        (dict(tile_k=128), "tile_k=128 must be 64"),
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
