"""Fused matmuls inside programs: many calls, neighbours, slices, donation, results nobody uses."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.simulator import RendezvousError

SCATTERED = ("matmul_reduce_scatter", "matmul_all_reduce")
# The all-reduce is the scatter and then some, by the same code.
everywhere = pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        pytest.param("matmul_reduce_scatter", marks=pytest.mark.slow),
        "matmul_all_reduce",
    ],
)


# What a program does around its kernels is the same for all.
mostly = pytest.mark.parametrize("name", ["all_gather_matmul", *map(slow, SCATTERED)])


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=1, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def bf16(*arrays):
    return [jnp.asarray(x, BF16) for x in arrays]


def fused(name, devices=2, **options):
    return cases.mapped(name, cases.mesh_of(devices), out_dtype=F32, **options)


@mostly
def test_repeated_calls_with_new_data(name, simulation):
    """No signal of one call is taken for one of the next (B01)."""
    program = jax.jit(fused(name))
    for seed in range(4):
        lhs, rhs = cases.operands(*cases.whole(name, 2, 16, 64, 64), seed=seed)
        np.testing.assert_array_equal(np.asarray(program(*bf16(lhs, rhs))), lhs @ rhs)
    assert simulation.launches == 4


@mostly
def test_calls_back_to_back_in_one_program(name, simulation):
    """A fast device that enters the next call spoils nothing of a slow one's (B02)."""
    calls = 8
    problems = [
        cases.operands(*cases.whole(name, 3, 8, 64, 64), seed=20 + call) for call in range(calls)
    ]
    lhs, rhs = bf16(*(np.stack(x) for x in zip(*problems, strict=True)))
    program = fused(name, 3)

    @jax.jit
    def run(lhs, rhs):
        return lax.scan(lambda _, xs: (None, program(*xs)), None, (lhs, rhs))[1]

    want = np.stack([left @ right for left, right in problems])
    np.testing.assert_array_equal(np.asarray(run(lhs, rhs)), want)
    assert simulation.launches == calls


@mostly
def test_shapes_in_turn_in_one_program(name):
    """Calls of different sizes follow one another without meeting each other's buffers (B04)."""
    rows = [1, 64, 7, 65]
    problems = [cases.operands(*cases.whole(name, 2, m, 16, 72), seed=m) for m in rows]
    program = fused(name)
    outs = jax.jit(lambda xs: [program(*x) for x in xs])([bf16(*p) for p in problems])
    for out, (lhs, rhs) in zip(outs, problems, strict=True):
        np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)


def test_compiled_sizes_in_any_order():
    """Programs of different sizes, compiled side by side, share nothing (B11)."""
    name = "matmul_all_reduce"
    programs = {m: jax.jit(fused(name)) for m in (1, 2, 8)}
    for seed, m in enumerate([1, 8, 2, 1, 8, 2, 2, 1]):
        lhs, rhs = cases.operands(*cases.whole(name, 2, m, 16, 72), seed=seed)
        np.testing.assert_array_equal(np.asarray(programs[m](*bf16(lhs, rhs))), lhs @ rhs)


def test_two_kernels_in_one_program_and_one_feeding_the_other(simulation):
    """The layer of a network: gather, epilogue, scatter; beside it an unrelated all-reduce."""
    devices, m, k, n = 2, 16, 64, 72
    lhs, up = cases.operands(devices * m, k, devices * n, seed=1)
    down, other = cases.operands(devices * n, k, k, seed=2)
    mesh = cases.mesh_of(devices)

    def layer(lhs, up, down, other):
        hidden = st.all_gather_matmul(lhs, up, "x", epilogue=jax.nn.relu, out_dtype=F32)
        small = (hidden - 2 * jnp.floor(hidden / 2)).astype(BF16)
        return st.matmul_reduce_scatter(small, down, "x", out_dtype=F32), st.matmul_all_reduce(
            down.T, other, "x", out_dtype=F32
        )

    specs = (P("x", None), P(None, "x"), P("x", None), P("x", None))
    program = jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=(P("x", None), P()), check_vma=False
    )
    tall = np.tile(other, (3, 1))[: devices * n]
    out, reduced = jax.jit(program)(*bf16(lhs, up, down, tall))
    small = np.maximum(lhs @ up, 0) % 2
    np.testing.assert_array_equal(np.asarray(out), small @ down)
    np.testing.assert_array_equal(np.asarray(reduced), down.T @ tall)
    assert simulation.launches == 3


@mostly
def test_operands_that_are_slices_transposes_and_strides(name):
    m, k, n = cases.whole(name, 2, 16, 24, 40)
    lhs = cases.whole_numbers(0, k, 2 * m)
    rhs = cases.whole_numbers(1, 3, k, n)

    def call(lhs, rhs):
        return fused(name)(lhs[:, ::2].T, lax.dynamic_index_in_dim(rhs, 1, keepdims=False))

    out = jax.jit(call)(*bf16(lhs, rhs))
    np.testing.assert_array_equal(np.asarray(out), lhs[:, ::2].T @ rhs[1])


@mostly
def test_a_slice_of_one_result_feeds_the_next(name):
    lhs, rhs = cases.operands(*cases.whole(name, 2, 16, 16, 16))
    k, n = rhs.shape

    def call(lhs, rhs):
        first = fused(name)(lhs, rhs)
        second = first[: k // 2, : n // 2]
        return fused(name)(lhs, jnp.tile(jnp.sign(second), (2, 2)).astype(BF16))

    out = jax.jit(call)(*bf16(lhs, rhs))
    first = lhs @ rhs
    np.testing.assert_array_equal(
        np.asarray(out), lhs @ np.tile(np.sign(first[: k // 2, : n // 2]), (2, 2))
    )


@mostly
def test_results_that_nobody_uses(name):
    """Removed or not, the program runs, and the same calls run on all devices."""
    lhs, rhs = cases.operands(*cases.whole(name, 2, 8, 64, 64))

    def call(lhs, rhs):
        fused(name)(lhs + 1, rhs)
        return fused(name)(lhs, rhs)

    np.testing.assert_array_equal(np.asarray(jax.jit(call)(*bf16(lhs, rhs))), lhs @ rhs)


@pytest.mark.parametrize("state_first", [True, slow(False)])
def test_donation(state_first):
    """A donated operand gives the same numbers whatever the order of results (B29)."""
    lhs, rhs = cases.operands(32, 32, 32)
    program = fused("all_gather_matmul")

    def step(state, rhs):
        new_state = program(state, rhs).astype(BF16)
        return (new_state, rhs * 2) if state_first else (rhs * 2, new_state)

    plain = jax.jit(step)(*bf16(lhs, rhs))
    donated, kept = bf16(lhs, rhs)
    mesh = cases.mesh_of(2)
    donated = jax.device_put(donated, jax.NamedSharding(mesh, P("x", None)))
    outs = jax.jit(step, donate_argnums=(0,))(donated, kept)
    for got, want in zip(outs, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    np.testing.assert_array_equal(
        np.asarray(outs[0 if state_first else 1], np.float32), cases.rounded(lhs @ rhs, BF16)
    )


@pytest.mark.parametrize("order", ["pct", pytest.param("random", marks=pytest.mark.slow)])
@mostly
def test_any_order_of_execution_gives_the_same(name, order):
    lhs, rhs = cases.operands(*cases.whole(name, 3, 24, 72, 72))
    program = jax.jit(fused(name, 3))
    for seed in range(2):
        with st.simulate(seed=seed, schedule=order, core_count=2):
            out = program(*bf16(lhs, rhs))
        np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)


def test_data_parallel_axis_beside_the_team():
    """Both axes of a mesh at work in one program: the kernel along one, `psum` along the other."""
    mesh = cases.mesh_of(2, 2, axes=("data", "model"))
    lhs, rhs = cases.operands(2 * 2 * 8, 16, 2 * 16)

    def call(lhs, rhs):
        out = st.all_gather_matmul(lhs, rhs, "model", out_dtype=F32)
        return out, lax.psum(out, "data")

    program = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(P(("data", "model"), None), P(None, "model")),
        out_specs=(P("data", "model"), P(None, "model")),
    )
    out, summed = jax.jit(program)(*bf16(lhs, rhs))
    np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)
    np.testing.assert_array_equal(np.asarray(summed), (lhs @ rhs).reshape(2, 16, 32).sum(0))


def test_a_device_that_skips_the_call_is_named():
    """`lax.cond` on a per-device predicate (B32): a report, never a hang."""
    mesh = cases.mesh_of(2)
    lhs, rhs = cases.operands(16, 64, 128)

    def call(lhs, rhs):
        return lax.cond(
            lax.axis_index("x") == 0,
            functools.partial(st.all_gather_matmul, axis_name="x"),
            lambda lhs, rhs: jnp.zeros((16, 64), lhs.dtype),
            lhs,
            rhs,
        )

    in_specs, out_spec = cases.specs("all_gather_matmul")
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)
    with (
        pytest.raises(RendezvousError, match="all_gather_matmul"),
        st.simulate(rendezvous_timeout=1, core_count=2),
    ):
        jax.block_until_ready(jax.jit(program)(*bf16(lhs, rhs)))
