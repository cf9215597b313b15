"""`expert_dispatch`: every row in its place, tables, capacity, the derivative; seeded bugs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, TOKENS, Without, dispatched, entries, on_devices, routings
from fused_cases import BF16, F32, whole_numbers
from jax import export
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.collectives import (
    combine,
    dispatch,
    dispatch_block,
    routed_dispatch,
    token_tables,
)
from stretto.kernels.xla import routing as routing_tables
from stretto.kernels.xla.routing import _fit

D = 64


def tokens(devices: int, seed: int = 0) -> np.ndarray:
    return whole_numbers(seed, devices * TOKENS, D)


def check(devices, index, x, rows, routing):
    found = np.asarray(rows, np.float32).reshape(devices, -1, D)
    wanted = entries(index, devices)
    counts = np.bincount(index[(index >= 0) & (index < EXPERTS)], minlength=EXPERTS)
    np.testing.assert_array_equal(routing.group_sizes, counts)
    np.testing.assert_array_equal(routing.tokens_per_expert, counts)
    assert routing.dropped == 0
    assert routing.out_of_range == ((index < -1) | (index >= EXPERTS)).sum()
    positions = np.full(index.shape, -1)
    for device, own in enumerate(wanted):
        for row, (token, choice) in enumerate(own):
            np.testing.assert_array_equal(found[device, row], x[token])
            positions[token, choice] = row * devices + device
    np.testing.assert_array_equal(routing.positions, positions)


@pytest.mark.parametrize(("devices", "block"), [slow(1, None), (2, None), slow(4, None), (4, 4)])
def test_rows_by_xla(monkeypatch, devices, block):
    """By comparisons of all entries, or by blocks of so many, as where there are many."""
    if block is not None:
        monkeypatch.setattr(routing_tables, "MOST_COMPARISONS", 0)
        monkeypatch.setattr(routing_tables, "BLOCK", block)
    x = tokens(devices)
    program = dispatched(devices, backend="xla")
    for index in routings(devices, 0).values():
        check(devices, index, x, *program(jnp.asarray(x), jnp.asarray(index, jnp.int32)))


@pytest.mark.parametrize(
    ("devices", "seed", "config"),
    [
        (4, 1, {}),
        (2, 2, dict(chunk=1, flat=True)),
        (2, 3, dict(tables=True)),
        slow(1, 0, dict(tables=True)),
    ]
    + [
        slow(devices, seed, ({}, dict(chunk=2), dict(tables=True))[seed % 3])
        for devices in (2, 4, 8)
        for seed in range(20)
    ],
)
def test_rows_by_the_kernel(devices, seed, config):
    """Also when a second call has other routings than the first."""
    x, cases = tokens(devices, seed), routings(devices, seed)
    with st.simulate(seed=seed, core_count=3) as report:
        program = dispatched(devices, config=dispatch.Config(**config))
        found = [
            jax.tree.map(np.asarray, program(jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32)))
            for index in cases.values()
        ]
    assert report.ok, str(report)
    for index, out in zip(cases.values(), found, strict=True):
        check(devices, index, x, *out)


@pytest.mark.parametrize(
    ("width", "dtype"), [(16, "float8_e4m3fn"), (72, BF16), slow(16, BF16), slow(4, F32)]
)
def test_rows_that_are_no_multiple_of_what_the_copy_engine_writes(width, dtype):
    """In shared memory each begins at a multiple of 128 bytes all the same.

    In 8 bits, and as scales of such rows are sent: 16 bytes are the fewest that are copied.
    """
    x = whole_numbers(0, 2 * TOKENS, width)
    index = routings(2, 0)["one choice"]
    with st.simulate(core_count=3) as report:
        program = dispatched(2, config=dispatch.Config(tables=dtype == BF16))
        rows, routing = program(jnp.asarray(x, dtype), jnp.asarray(index, jnp.int32))
        found = np.asarray(rows, np.float32).reshape(2, -1, width)
    assert rows.dtype == dtype
    assert report.ok and report.launches == 1, str(report)
    for token, place in np.ndenumerate(np.asarray(routing.positions)[:, 0]):
        np.testing.assert_array_equal(found[place % 2, place // 2], x[token])


@pytest.mark.parametrize("seed", range(2))
def test_capacity(seed):
    devices, room = 2, 9
    x, index = tokens(devices), routings(devices, seed)["zipf"]
    rows, routing = dispatched(devices, capacity=room, backend="xla")(
        jnp.asarray(x), jnp.asarray(index, jnp.int32)
    )
    assert rows.shape == (devices * room, D)
    own = EXPERTS // devices
    kept = 0
    for device, all_rows in enumerate(entries(index, devices)):
        groups: dict = {}
        for t, j in all_rows:
            groups.setdefault((index[t, j], t // TOKENS), []).append((t, j))
        names = [(e, s) for e in range(device * own, (device + 1) * own) for s in range(devices)]
        sizes = [len(groups.get(name, [])) for name in names]
        cut = np.asarray(_fit(jnp.array(sizes, jnp.int32), room))
        wanted = [
            x[t] for name, n in zip(names, cut, strict=True) for t, _ in groups.get(name, [])[:n]
        ]
        kept += len(wanted)
        assert len(wanted) == min(room, sum(sizes))
        np.testing.assert_array_equal(
            np.asarray(rows)[device * room : device * room + len(wanted)], np.array(wanted)
        )
    assert routing.dropped == index.size - kept > 0


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_cut_off_at_one_limit(seed):
    draw = np.random.default_rng(seed)
    sizes, room = draw.integers(0, 12, 7), int(draw.integers(1, 60))
    cut = np.asarray(_fit(jnp.array(sizes, jnp.int32), room))
    assert cut.sum() == min(room, sizes.sum()) and (cut <= sizes).all()
    limits = cut[cut < sizes]
    assert limits.size == 0 or (limits.max() - limits.min() <= 1 and cut.max() <= limits.min() + 1)


def test_tables_by_the_kernel_only_of_few_tokens_that_all_fit(monkeypatch):
    x, index = jnp.zeros((2 * TOKENS, D), BF16), jnp.zeros((2 * TOKENS, 3), jnp.int32)

    def kernels(**options):
        program = dispatched(2, config=dispatch.Config(tables=True), backend="simulator", **options)
        return re.findall(r"expert_dispatch\w*", str(program.trace(x, index).jaxpr))

    assert "expert_dispatch_with_tables" in kernels()
    assert "expert_dispatch_with_tables" not in kernels(capacity=2 * 3 * TOKENS - 1)
    monkeypatch.setattr(routed_dispatch, "MOST_ENTRIES", 255)  # 128 of each device.
    assert "expert_dispatch_with_tables" not in kernels()


@pytest.mark.parametrize("tables", [False, True])
def test_derivative(tables):
    """A token gets the sum of its rows' cotangents; what the rows beyond hold does not matter."""
    devices = 2
    x, index = tokens(devices), jnp.asarray(routings(devices, 3)["any"], jnp.int32)

    def squared(**options):
        def body(x, index):
            rows, routing = st.expert_dispatch(x, index, "x", num_experts=EXPERTS, **options)
            filled = jnp.arange(rows.shape[0]) < routing.group_sizes.sum()
            return jnp.sum(jnp.where(filled[:, None], rows, 0).astype(F32) ** 2)[None]

        return jax.grad(lambda x: jnp.sum(on_devices(body, devices, 2)(x, index)))

    count = ((index >= 0) & (index < EXPERTS)).sum(axis=1)[:, None]
    np.testing.assert_array_equal(squared(backend="xla")(jnp.asarray(x)), 2 * x * count)
    with st.simulate(core_count=3) as report:
        found = np.asarray(jax.jit(squared(config=dispatch.Config(tables=tables)))(jnp.asarray(x)))
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, 2 * x * count)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (dispatch_block, "barrier_wait"),
        (token_tables, "barrier_wait"),
        (dispatch_block, "wait_smem_to_gmem"),
        (dispatch_block, "commit_smem_to_gmem_group"),
    ],
)
def test_each_wait_is_needed(monkeypatch, traces_apart, module, name):
    monkeypatch.setattr(module, "plgpu", Without(module.plgpu, name))
    x, index = tokens(2), routings(2, 0)["zipf"]
    program = dispatched(2, config=dispatch.Config(slots=2), backend="simulator")
    found = False
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=1, on_finding="record") as report:
                jax.block_until_ready(program(jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32)))
            found |= not report.ok
        except SimulationError:
            found = True
    assert found


def test_a_number_of_tokens_that_is_known_when_the_program_runs():
    (tokens,) = export.symbolic_shape("t", constraints=["mod(t, 2) == 0"])
    given = [
        jax.ShapeDtypeStruct((tokens, width), dtype) for width, dtype in ((D, BF16), (3, "i4"))
    ]
    assert export.export(dispatched(2))(*given).nr_devices == 2


class WithoutBarrier:
    """`plgpu` that waits for one kind of barriers only: an array's, or single ones."""

    def __init__(self, module, arrays):
        self.module, self.arrays = module, arrays

    def __getattr__(self, name):
        return getattr(self.module, name)

    def barrier_wait(self, barrier):
        if hasattr(barrier, "transforms") == self.arrays:
            self.module.barrier_wait(barrier)


@pytest.mark.parametrize(
    ("without", "which"),
    [
        (WithoutBarrier, True),
        (WithoutBarrier, False),
        (Without, "commit_smem"),
        (Without, "commit_smem_to_gmem_group"),
    ],
)
def test_each_wait_of_the_kernel_with_tables_is_needed(monkeypatch, traces_apart, without, which):
    """The last wait is also needed, by a kernel of one device."""
    monkeypatch.setattr(routed_dispatch, "plgpu", without(routed_dispatch.plgpu, which))
    x, index = tokens(2), routings(2, 0)["zipf"]
    program = dispatched(2, config=dispatch.Config(tables=True), backend="simulator")
    found = False
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
                jax.block_until_ready(program(jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32)))
            found |= not report.ok
        except SimulationError:
            found = True
        if found:
            break
    assert found


@pytest.mark.parametrize("chunk", [0, 3, 12, 264])
def test_chunks_that_cannot_be(chunk):
    for config in (dispatch.Config(chunk=chunk), combine.Config(chunk=chunk)):
        with pytest.raises(ValueError, match=f"chunk={chunk} must be 1, 2, 4 or a multiple of 8"):
            config.check()


@pytest.mark.parametrize(
    ("x", "index", "options", "message"),
    [
        ((12, 8, 8), (12, 2), {}, r"x is float32\[6, 8, 8\]; it must be \[tokens, d\]"),
        ((12, 8), (10, 2), {}, r"expert_index is int32\[5, 2\]; it must be int32\[6, top_k\]"),
        ((12, 8), (12, 2), dict(num_experts=7), "num_experts=7 must be a multiple of the 2"),
        ((12, 8), (12, 2), dict(capacity=0), "capacity=0 must be at least 1"),
        ((12, 8), (12, 2), dict(capacity=2**30), "2\\^31 is the limit"),
    ],
)
def test_bad_input(x, index, options, message):
    options = dict(num_experts=8) | options
    body = lambda x, i: st.expert_dispatch(x, i, "x", **options)[0]  # noqa: E731
    with pytest.raises(ValueError, match=f"expert_dispatch: .*{message}"):
        on_devices(body, 2, 2)(jnp.zeros(x), jnp.zeros(index, jnp.int32))


def test_a_large_table_leaves_tokens_less_memory():
    """The simulator refuses a kernel that needs more than a block has."""
    x, index = jnp.zeros((512, 3072), BF16), jnp.full((512, 16), -1, jnp.int32)
    config = dispatch.Config(chunk=256, slots=32)
    with st.simulate(core_count=1) as report:
        _, routing = dispatched(2, config=config, capacity=8)(x, index)
        counts = np.asarray(routing.tokens_per_expert)
    assert report.ok and report.launches == 1 and not counts.any(), str(report)
