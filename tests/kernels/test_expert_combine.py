"""`expert_combine`: weighted sums in a fixed order, both derivatives; seeded bugs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import TOKENS, Without, combined, dispatched, routings
from fused_cases import BF16, F32, whole_numbers
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.collectives import combine, dispatch, token_sums, token_tables
from stretto.kernels.operations import mixture_rules
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types


def operands(devices: int, seed: int, name: str, width: int = 64):
    """Rows, weights, positions, and the weighted sum."""
    index = routings(devices, seed)[name]
    x = whole_numbers(seed, devices * TOKENS, width)
    _, routing = dispatched(devices, backend="xla")(jnp.asarray(x), jnp.asarray(index, jnp.int32))
    positions = np.asarray(routing.positions)
    rows = whole_numbers(seed + 1, devices, max(16, devices * index.size // devices), width)
    weights = np.abs(whole_numbers(seed + 2, *index.shape))
    wanted = np.zeros((len(index), width), np.float32)
    for (t, j), place in np.ndenumerate(positions):
        if place >= 0:
            wanted[t] += weights[t, j] * rows[place % devices, place // devices]
    return rows.reshape(-1, width), weights, positions, wanted


def given(rows, weights, positions, dtype=BF16):
    return jnp.asarray(rows, dtype), jnp.asarray(weights), jnp.asarray(positions)


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize("name", ["any", "none", "one choice"])
def test_sums_by_xla(devices, name):
    *arrays, wanted = operands(devices, 0, name)
    np.testing.assert_array_equal(combined(devices, backend="xla")(*given(*arrays, F32)), wanted)


@pytest.mark.parametrize(
    ("devices", "seed", "width", "wire", "chunk"),
    [(4, 1, 192, F32, 32), (2, 1, 64, None, 1)]
    + [slow(d, s, 64, None, (32, 2)[s % 2]) for d in (2, 4, 8) for s in range(20)],
)
def test_sums_by_the_kernel(devices, seed, width, wire, chunk):
    with st.simulate(seed=seed, core_count=3) as report:
        config = combine.Config(chunk=chunk, flat=chunk < 8)
        program = combined(devices, wire_dtype=wire, config=config)
        for name in ("any", "zipf", "none", "none to a device"):
            *arrays, wanted = operands(devices, seed, name, width)
            out = np.asarray(program(*given(*arrays)), np.float32)
            np.testing.assert_array_equal(out, np.asarray(jnp.asarray(wanted, BF16), np.float32))
    assert report.ok, str(report)


def by_warpgroups(warpgroups: int, width: int, **settings):
    """Sums of tokens in five chunks a device, those that are right, and the report."""
    tokens, top_k, devices = 40, 3, 2
    draw = np.random.default_rng(width)
    count = devices * tokens * top_k
    positions = draw.permutation(count).reshape(-1, top_k)
    positions[draw.random(positions.shape) < 0.2] = -1
    rows, weights = whole_numbers(0, count, width), np.abs(whole_numbers(1, *positions.shape))
    wanted = np.zeros((len(positions), width), np.float32)
    for (t, j), place in np.ndenumerate(positions):
        if place >= 0:
            wanted[t] += weights[t, j] * rows[place % devices * (count // 2) + place // devices]
    config = combine.Config(warpgroups=warpgroups, slots=4, chunk=8)
    with st.simulate(**settings) as report:
        out = combined(devices, config=config)(*given(rows, weights, positions.astype(np.int32)))
        out = np.asarray(out, np.float32)
    return out, np.asarray(jnp.asarray(wanted, BF16), np.float32), report


@pytest.mark.parametrize(
    ("warpgroups", "cores", "width"), [(2, 2, 64), slow(4, 1, 64), slow(2, 2, 192), slow(3, 2, 72)]
)
def test_sums_by_several_warpgroups(warpgroups, cores, width):
    """Also of rows that are padded in shared memory."""
    out, wanted, report = by_warpgroups(warpgroups, width, core_count=cores)
    assert report.ok and report.launches == 1, str(report)
    np.testing.assert_array_equal(out, wanted)


def test_warpgroups_have_slots_of_their_own(monkeypatch, traces_apart):
    monkeypatch.setattr(token_tables.Chunks, "slot", lambda _, number, slots: number % slots)
    settings = dict(core_count=2, on_finding="record")
    found = False
    for seed in range(3):
        try:
            found |= not by_warpgroups(2, 64, seed=seed, **settings)[2].ok
        except SimulationError:
            found = True
        if found:
            break
    assert found


def test_the_same_bits_every_run_and_everywhere():
    """Numbers that round: the kernel's order of sums is XLA's."""
    rows, _, positions, _ = operands(2, 5, "any")
    key = jax.random.key(0)
    rows = jax.random.normal(key, rows.shape, BF16)
    weights = jax.random.uniform(key, positions.shape)
    arrays = rows, weights, jnp.asarray(positions)
    plain = np.asarray(combined(2, backend="xla")(*arrays), np.float32)
    outs = []
    for seed in range(3):
        with st.simulate(seed=seed, core_count=3) as report:
            outs.append(np.asarray(combined(2)(*arrays), np.float32))
        assert report.ok
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_allclose(out, plain, rtol=2**-7, atol=2**-8)


def test_derivatives():
    *arrays, _ = operands(2, 6, "any")
    rows, weights, positions = arrays
    bar = whole_numbers(9, len(positions), 64)

    def gradients(backend):
        def loss(rows, weights):
            out = combined(2, backend=backend)(rows, weights, jnp.asarray(positions))
            return jnp.sum(out.astype(F32) * bar)

        return jax.jit(jax.grad(loss, (0, 1)))

    rows_bar, weights_bar = np.zeros((2, len(rows) // 2, 64)), np.zeros(weights.shape)
    for (t, j), place in np.ndenumerate(positions):
        if place >= 0:
            rows_bar[place % 2, place // 2] += weights[t, j] * bar[t]
            weights_bar[t, j] = rows.reshape(2, -1, 64)[place % 2, place // 2] @ bar[t]
    xs = jnp.asarray(rows), jnp.asarray(weights)
    with st.simulate(core_count=3) as report:
        fused = jax.tree.map(np.asarray, gradients("auto")(*xs))
    assert report.ok, str(report)
    for found in (fused, gradients("xla")(*xs)):
        np.testing.assert_array_equal(np.asarray(found[0]).reshape(rows_bar.shape), rows_bar)
        np.testing.assert_array_equal(found[1], weights_bar)


@pytest.mark.parametrize(
    ("tokens", "devices", "to_combine"),
    [
        (16384, 2, dict(warpgroups=2, totals=True, chunk=8, num_blocks=128)),
        (512, 2, {}),
        (128, 2, dict(chunk=2)),
        (16384, 4, dict(warpgroups=2)),
    ],
)
def test_defaults_of_few_and_many_tokens(tokens, devices, to_combine):
    """Also those of a layer. The dispatch's are the same for any number on two devices."""
    types = Types(lhs="bfloat16", rhs="float32", out="bfloat16")
    sizes = dict(t=tokens, d=2048, top_k=8, rows=tokens * 8)
    machine = Machine.of_kind("gpu", "NVIDIA H200")
    problem = Problem(
        operation="expert_combine", sizes=sizes, types=types, devices=devices, machine=machine
    )
    many = dict(counted=True, slots=8, stores=1) if devices == 2 else {}
    there = dispatch.Config(tables=True, **many)
    back = combine.Config(**to_combine)
    assert dispatch.KERNEL.default(problem) == there
    assert combine.KERNEL.default(problem) == back
    layer = mixture_rules.Config(dispatch=there, combine=back)
    assert mixture_rules.KERNEL.default(problem) == layer


@pytest.mark.parametrize(
    ("module", "name"),
    [
        slow(token_tables, "barrier_wait"),  # Which test_expert_dispatch.py leaves out, too.
        (token_sums, "wait_smem_to_gmem"),
        (token_sums, "commit_smem"),
    ],
)
def test_each_wait_is_needed(monkeypatch, traces_apart, module, name):
    *arrays, _ = operands(2, 0, "zipf")
    program = combined(2, backend="simulator")
    monkeypatch.setattr(module, "plgpu", Without(module.plgpu, name))
    found = False
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=1, on_finding="record") as report:
                jax.block_until_ready(program(*given(*arrays)))
            found |= not report.ok
        except SimulationError:
            found = True
    assert found
