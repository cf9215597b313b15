"""The dispatch of many tokens that makes the tables, and its tables; seeded bugs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import Without, on_devices
from fused_cases import BF16, F32, whole_numbers
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed import semaphores
from stretto.distributed.simulator import SimulationError
from stretto.kernels.collectives import chunk_tables, counted_block, counted_dispatch, dispatch
from stretto.kernels.problem.routing import Routing

D, TOKENS, TOP_K = 64, 45, 5
ROUTING = Routing(P("x"), P("x"), P(), P(), P())


def routings(devices: int, experts: int, seed: int, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shape = devices * tokens, TOP_K
    zipf = 1 / np.arange(1, experts + 1)
    return {
        "out of range": draw.integers(-4, experts + 4, shape),
        "zipf": draw.choice(experts, shape, p=zipf / zipf.sum()),
        "all to one": np.full(shape, experts - 1),
        "none": np.full(shape, -1),
    }


def program(devices: int, experts: int, **options):
    def body(x, index):
        return st.expert_dispatch(x, index, "x", num_experts=experts, **options)

    return on_devices(body, devices, 2, (P("x"), ROUTING))


def as_numpy(devices: int, out) -> tuple[list[np.ndarray], Routing]:
    """Of each device the rows that belong to an expert; and the tables."""
    rows, routing = jax.tree.map(np.asarray, out)
    used = routing.group_sizes.reshape(devices, -1).sum(axis=1)
    rows = rows.astype(np.float32).reshape(devices, -1, D)
    return [x[:n] for x, n in zip(rows, used, strict=True)], routing


@pytest.mark.parametrize(
    ("devices", "experts", "cores", "seed", "stores"),
    [(2, 8, 3, 0, 1), (2, 8, 4, 0, 2), (4, 8, 2, 1, 3), slow(2, 256, 1, 2, 2)]
    + [slow(devices, 16, 3, seed, 1) for devices in (2, 4, 8) for seed in range(20)],
)
def test_rows_and_tables(devices, experts, cores, seed, stores):
    """As XLA's: of chunks in several vectors, and of the last one with fewer tokens."""
    x = jnp.asarray(whole_numbers(seed, devices * TOKENS, D), BF16)
    config = dispatch.Config(counted=True, num_blocks=cores, slots=4, stores=stores)
    ours, theirs = (
        program(devices, experts, config=config),
        program(devices, experts, backend="xla"),
    )
    for index in routings(devices, experts, seed).values():
        index = jnp.asarray(index, jnp.int32)
        with st.simulate(seed=seed, core_count=cores) as report:
            found = as_numpy(devices, ours(x, index))
        assert report.ok and report.launches == 1, str(report)
        jax.tree.map(np.testing.assert_array_equal, found, as_numpy(devices, theirs(x, index)))


def test_fewer_tokens_than_blocks():
    devices, experts = 2, 8
    index = jnp.asarray(routings(devices, experts, 0, tokens=2)["zipf"], jnp.int32)
    x = jnp.asarray(whole_numbers(0, devices * 2, D), BF16)
    with st.simulate(core_count=3) as report:
        config = dispatch.Config(counted=True)
        found = as_numpy(devices, program(devices, experts, config=config)(x, index))
    assert report.ok, str(report)
    theirs = as_numpy(devices, program(devices, experts, backend="xla")(x, index))
    jax.tree.map(np.testing.assert_array_equal, found, theirs)


def test_derivative():
    devices, experts = 2, 8
    x = whole_numbers(0, devices * TOKENS, D)
    index = jnp.asarray(routings(devices, experts, 3)["out of range"], jnp.int32)
    config = dispatch.Config(counted=True)

    def body(x, index):
        rows, routing = st.expert_dispatch(x, index, "x", num_experts=experts, config=config)
        filled = jnp.arange(rows.shape[0]) < routing.group_sizes.sum()
        return jnp.sum(jnp.where(filled[:, None], rows, 0).astype(F32) ** 2)[None]

    count = ((index >= 0) & (index < experts)).sum(axis=1)[:, None]
    with st.simulate(core_count=3) as report:
        grad = jax.jit(jax.grad(lambda x: jnp.sum(on_devices(body, devices, 2)(x, index))))
        found = np.asarray(grad(jnp.asarray(x)))
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, 2 * x * count)


def kernels(experts: int = 8, tokens: int = TOKENS, **options) -> list[str]:
    config = dispatch.Config(counted=True, num_blocks=options.pop("num_blocks", 1024))
    given = jnp.zeros((2 * tokens, D), BF16), jnp.zeros((2 * tokens, TOP_K), jnp.int32)
    made = program(2, experts, config=config, backend="simulator", **options)
    return re.findall(r"expert_dispatch\w*", str(made.trace(*given).jaxpr))


def test_calls_that_it_does_not_serve():
    """XLA makes the tables of those."""
    name = "expert_dispatch_counted"
    assert name in kernels()
    assert name not in kernels(capacity=2 * TOKENS * TOP_K - 1)
    assert name not in kernels(experts=counted_dispatch.MOST_EXPERTS + 2)
    assert name not in kernels(tokens=2 * counted_dispatch.MOST_VECTORS * 128, num_blocks=2)


def is_found(cores: int = 2) -> bool:
    """Whether the simulator finds anything in some of its orders."""
    x = jnp.asarray(whole_numbers(0, 2 * TOKENS, D), BF16)
    index = jnp.asarray(routings(2, 8, 0)["zipf"], jnp.int32)
    config = dispatch.Config(counted=True, slots=2)
    faulty = program(2, 8, config=config, backend="simulator")
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=cores, on_finding="record") as report:
                jax.block_until_ready(faulty(x, index))
            if not report.ok:
                return True
        except SimulationError:
            return True
    return False


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (counted_block, "commit_smem_to_gmem_group"),
        (chunk_tables, "barrier_wait"),
        (chunk_tables, "commit_smem"),
    ],
)
def test_each_step_is_needed(monkeypatch, traces_apart, module, name):
    monkeypatch.setattr(module, "plgpu", Without(module.plgpu, name))
    assert is_found()


class Instead:
    """`plgpu` with another function in place of one of its own."""

    def __init__(self, module, **others):
        self.module, self.others = module, others

    def __getattr__(self, name):
        return self.others.get(name) or getattr(self.module, name)


@pytest.mark.parametrize("name", ["entries_arrived", "found", "arrived"])
def test_each_wait_at_a_barrier_is_needed(monkeypatch, traces_apart, name):
    """Of the table's barriers one at a time is not waited for."""
    plgpu, run, left_out = counted_block.plgpu, counted_block.Block.run, []

    def noted(block):
        def wait(barrier):
            if getattr(barrier, "ref", barrier) is getattr(block, name):
                left_out.append(barrier)
            else:
                plgpu.barrier_wait(barrier)

        monkeypatch.setattr(counted_block, "plgpu", Instead(plgpu, barrier_wait=wait))
        run(block)

    monkeypatch.setattr(counted_block.Block, "run", noted)
    assert is_found()
    assert left_out


def test_slots_are_filled_again_after_their_stores(monkeypatch, traces_apart):
    plgpu = counted_block.plgpu

    def wait(stores, *, wait_read_only):
        if stores == 0:
            plgpu.wait_smem_to_gmem(stores, wait_read_only=wait_read_only)

    monkeypatch.setattr(counted_block, "plgpu", Instead(plgpu, wait_smem_to_gmem=wait))
    assert is_found()


def test_the_wait_for_counts_is_needed(monkeypatch, traces_apart):
    wait = semaphores.Semaphore.wait

    def without(self, *args, **kwargs):
        if self.site.semaphore != "counted":
            wait(self, *args, **kwargs)

    monkeypatch.setattr(semaphores.Semaphore, "wait", without)
    assert is_found()


@pytest.mark.parametrize("steps", [(), ("zero",), ("wait",)])
def test_the_counter_is_zeroed_once_all_blocks_have_seen_it(monkeypatch, traces_apart, steps):
    def some(self):
        if "wait" in steps:
            self.seen.wait(self.how.num_blocks, decrement=True)
        if "zero" in steps:
            self.counted.zero()

    monkeypatch.setattr(counted_block.Block, "_zero_counted", some)
    assert is_found()


def test_counts_are_told_when_they_are_in_place(monkeypatch, traces_apart):
    tell = counted_block.Block._tell
    early = Without(counted_block.plgpu, "wait_smem_to_gmem")

    def too_early(self):
        plgpu = counted_block.plgpu
        counted_block.plgpu = early
        tell(self)
        counted_block.plgpu = plgpu

    monkeypatch.setattr(counted_block.Block, "_tell", too_early)
    assert is_found()


def test_all_counts_are_told_before_tokens_are_asked_for(monkeypatch, traces_apart):
    """Signals that follow loads over the links come late."""
    order = []

    def note(owner, name, label):
        done = getattr(owner, name)

        def noted(self, *args, **kwargs):
            order.append(label(self))
            return done(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(counted_block.Block, "_tell", lambda _: "tell")
    note(counted_block.Block, "_fetch", lambda _: "fetch")
    note(semaphores.Semaphore, "wait", lambda semaphore: semaphore.site.semaphore)
    assert kernels()
    assert order[:3] == ["tell", "counted", "fetch"]
