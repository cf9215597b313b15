"""Combine under the grouped matmul: sums, orders, registers; every wait is needed."""

from __future__ import annotations

import functools

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    EXPERTS,
    Without,
    layer_operands,
    on_devices,
    routings,
    simulated_layer,
)
from fused_cases import BF16, F32, whole_numbers

import stretto as st
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import SimulationError
from stretto.distributed.team import Team
from stretto.kernels.engine import storing
from stretto.kernels.engine.assignment import with_fewer_registers
from stretto.kernels.engine.hopper.tile_config import LARGE, TileConfig
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.orders import BandsOrder, RowTilesOrder
from stretto.kernels.fused import matmul_combine
from stretto.kernels.fused.cut_rows import cut
from stretto.kernels.operations import mixture_rules
from stretto.kernels.operations.expert_checks import room_for
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.xla.routing import route

SMALL = TileConfig(tile_n=64, num_stages=2, store_buffers=1)
CONFIG = matmul_combine.Config(tiles=SMALL, band=2, stages=3, chunk=8)
K = 64


def summed(devices: int, experts: int = EXPERTS, *, sides: int = 1, transposed: bool = False):
    """`(lhs, index, weights, rhs)` -> sums; lhs has as many rows as there may be."""

    def body(lhs, index, weights, rhs):
        rows = room_for(*index.shape, devices, None)
        routing = route(index, ("x",), num_experts=experts, rows=rows)
        return matmul_combine.matmul_combine(
            jnp.split(lhs, sides, axis=1),
            jnp.split(rhs, sides, axis=2 if transposed else 1),
            routing.group_sizes,
            weights,
            routing.positions,
            Team.along(("x",)),
            wire_dtype=F32,
            config=CONFIG,
            rhs_transposed=transposed,
            interpret=None,
        )

    return on_devices(body, devices, 4)


def given(devices: int, index: np.ndarray, width: int, experts: int = EXPERTS, k: int = K):
    """Whole numbers: rows by expert, weights and matrices; and the sums."""
    tokens, top_k = len(index) // devices, index.shape[1]
    rows = room_for(tokens, top_k, devices, None)
    lhs = whole_numbers(0, devices, rows, k, largest=1)
    rhs = whole_numbers(1, experts, k, width, largest=1)
    weights = np.abs(whole_numbers(2, *index.shape, largest=2))
    wanted = np.zeros((len(index), width), np.float32)
    own = experts // devices
    for device in range(devices):
        row = 0
        for expert in range(device * own, (device + 1) * own):
            for t, j in zip(*np.nonzero(index == expert), strict=True):
                wanted[t] += weights[t, j] * (lhs[device, row] @ rhs[expert])
                row += 1
    operands = (
        jnp.asarray(lhs.reshape(-1, k), BF16),
        jnp.asarray(index, jnp.int32),
        jnp.asarray(weights, F32),
        jnp.asarray(rhs, BF16),
    )
    return operands, np.asarray(jnp.asarray(wanted, BF16), np.float32)


def check(program, operands, wanted, seed: int):
    with st.simulate(seed=seed, core_count=3) as report:
        found = np.asarray(program(*operands), np.float32)
    assert report.ok and report.launches == 1, str(report)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("devices", "seed", "width"),
    [(4, 0, 192)]
    + [
        pytest.param(devices, seed, width, marks=pytest.mark.slow)
        for devices in (1, 2, 3, 4, 8)
        for seed in range(5)
        for width in (128, 448)
    ],
)
def test_sums(monkeypatch, devices, seed, width):
    """Of each routing in turn by one program; tiles, bands and pieces that divide nothing."""
    monkeypatch.setattr(expert_cases, "EXPERTS", EXPERTS // devices * devices)
    cases = routings(devices, seed)
    names = ["zipf", "none to a device", "none"] if seed == 0 and width == 192 else list(cases)
    program = summed(devices, expert_cases.EXPERTS)
    for name in names:
        index = np.minimum(cases[name], expert_cases.EXPERTS + 5)
        check(program, *given(devices, index, width, expert_cases.EXPERTS), seed)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sides", [1, 2])
def test_both_layouts_and_sums_of_two_products(sides, transposed):
    operands, wanted = given(2, routings(2, 1)["any"], 320, k=sides * K)
    *others, rhs = operands
    rhs = rhs.swapaxes(1, 2) if transposed else rhs
    check(summed(2, sides=sides, transposed=transposed), (*others, rhs), wanted, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 1), (1, 8, 16), (20, 512, 3), (3, 512, 16)]
)
def test_one_token_many_experts_and_many_choices(tokens, experts, top_k):
    index = np.random.default_rng(0).integers(0, experts, (2 * tokens, top_k))
    check(summed(2, experts), *given(2, index, 128, experts), 0)


def test_tiles_come_band_by_band():
    rows = RowTilesOrder(jnp.int32(5), 7, 8, SMALL, lambda m: (m,))
    order = BandsOrder(rows, 3)
    locate = jax.jit(lambda index: order.locate(index)[1:])
    found = [locate(jnp.int32(i)) for i in range(int(order.count()))]
    places = [(int(m), int(n)) for m, n, *_ in found]
    assert sorted(places) == [(m, n) for m in range(5) for n in range(8)]
    assert [n // 3 for _, n in places] == [0] * 15 + [1] * 15 + [2] * 10
    assert all(int(facts[0]) == m for (m, _), (_, _, facts, *_) in zip(places, found, strict=True))


@pytest.mark.parametrize(
    ("width", "pieces", "filled"),
    [(2048, 4, 512), (4096, 8, 512), (7168, 14, 512), (2880, 3, 1024), (128, 1, 512)],
)
def test_pieces_of_a_row(width, pieces, filled):
    """Half a kilobyte of numbers, or more where less of it is lost to filling up."""
    row, piece = cut(width)
    assert row.parts * row.columns == width and row.parts == pieces * piece.parts
    assert piece.padded * row.columns == filled
    assert cut(96) is None


def test_registers_for_one_more_warpgroup():
    """All together no more than a block has; those of single warps stay."""
    roles = [Role(print, 2, 232), Role(print, 0, 40), Role(print, 0, 40)]
    multiplying, *warps = with_fewer_registers(roles, 56, 1)
    assert multiplying.registers == 208 and 2 * 208 + 56 + 40 == 512
    assert [role.registers for role in warps] == [40, 40]
    assert with_fewer_registers([Role(print, 2, 100)], 56, 1)[0].registers == 100


BUGS = {
    "columns are finished": (matmul_combine._Parts, "_wait_for"),
    "the last tile is finished": (matmul_combine._Parts, "_wait_for"),
    "stores of tiles are complete": (storing, "wait_smem_to_gmem"),
    "sums are in place": (matmul_combine, "wait_smem_to_gmem"),
    "no peer needs this device": (Semaphore, "wait"),
}
"""What is left out."""


def leave_out(monkeypatch, bug: str):
    where, name = BUGS[bug]
    original = getattr(where, name, None)
    if bug == "columns are finished":
        monkeypatch.setattr(where, name, lambda *_: None)
    elif bug == "the last tile is finished":

        def one_too_few(self, value=1, **options):
            fewer = value - 1 if self.site.semaphore == "finished" else value
            Semaphore_wait(self, fewer, **options)

        Semaphore_wait = Semaphore.wait
        monkeypatch.setattr(Semaphore, "wait", one_too_few)
    elif where is Semaphore:

        def wait(self, *args, **options):
            if self.site.semaphore != "released":
                original(self, *args, **options)

        monkeypatch.setattr(where, name, wait)
    else:
        monkeypatch.setattr(where, "plgpu", Without(where.plgpu, name))


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=() if number < 1 else pytest.mark.slow)
        for number, bug in enumerate(BUGS)
    ],
)
def test_each_wait_is_needed(monkeypatch, traces_apart, bug):
    leave_out(monkeypatch, bug)
    operands, _ = given(2, np.random.default_rng(0).integers(0, EXPERTS, (24, 2)), 128)
    program, found = summed(2), False
    for seed in range(4):
        try:
            with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
                jax.block_until_ready(program(*operands))
            found |= not report.ok
        except SimulationError as error:
            assert "is outside" not in str(error)  # That would be this test's own mistake.
            found = True
        if found:
            break
    assert found


def of_a_layer(fused: bool, program, *given, **settings):
    config = mixture_rules.Config(combine_under_product=fused, last=CONFIG)
    return simulated_layer(config, program, *given, **settings)


@pytest.mark.slow
def test_a_layer():
    """The same bits as in two steps, in every run; one launch less."""
    given = layer_operands(64)
    plain, launches = of_a_layer(False, lambda layer: layer, *given)
    for seed in range(3):
        fused, fewer = of_a_layer(True, lambda layer: layer, *given, seed=seed)
        assert fewer == launches - 1
        np.testing.assert_array_equal(fused, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sides", [1, 2])
def test_gradients_of_a_layer(sides):
    """The backward pass combines likewise. Of gate and up in two matrices it adds products up in
    float32, which two steps round before.
    """
    x, index, weights, w_in, w_out = layer_operands(64)
    w_in = w_in if sides == 1 else tuple(jnp.split(w_in, 2, axis=2))

    def gradients(layer):
        def loss(x, weights, w_in, w_out):
            return jnp.sum(layer(x, index, weights, w_in, w_out).astype(F32))

        return jax.value_and_grad(loss, (0, 1, 2, 3))

    plain, launches = of_a_layer(False, gradients, x, weights, w_in, w_out)
    fused, fewer = of_a_layer(True, gradients, x, weights, w_in, w_out)
    assert fewer == launches - 2 - (sides - 1)
    compare = np.testing.assert_array_equal
    if sides == 2:
        compare = functools.partial(np.testing.assert_allclose, rtol=2**-6, atol=2**-6)
    for got, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        compare(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("lhs", "width", "top_k", "words"),
    [
        (((64, 128), F32), 128, 2, "bfloat16 and float16, not float32"),
        (((60, 128), BF16), 128, 2, "60 rows is no multiple of 8"),
        (((64, 128), BF16), 96, 2, "d=96 are no multiple of 64"),
        (((64, 128), BF16), 64, 2, "d=64 are no multiple of 64, or just one"),
        (((64, 128), BF16), 128, 17, "top_k=17 rows for each of two sums do not fit"),
        (((64, 0), BF16), 128, 2, "nothing to do"),
    ],
)
def test_what_it_does_not_take(lhs, width, top_k, words):
    """Which is then made in two steps."""
    assert words in matmul_combine.obstacle(jax.ShapeDtypeStruct(*lhs), width, top_k, CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tiles=LARGE), "tile_n=256 must be 192 at most"),
        (dict(band=0), "band=0 must be at least 1"),
        (dict(chunk=12), "chunk=12 must be a multiple of 8"),
        (dict(stages=1), "stages=1 must be between 2 and 8"),
        (dict(registers=60), "registers=60 must be a multiple of 8"),
    ],
)
def test_configurations_that_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        mixture_rules.Config(
            combine_under_product=True, last=matmul_combine.Config(**changes)
        ).check()
    mixture_rules.Config(last=matmul_combine.Config(**changes)).check()  # Not used.


def test_nothing_takes_it_by_default():
    """It was never run on hardware; the tuner tries it, on Hopper."""
    sizes = dict(t=8192, d=2048, f=768, experts=128, top_k=8)
    types = Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16")
    machine = Machine.of_kind("gpu", "NVIDIA H200")
    problem = Problem(
        operation="mixture_of_experts", sizes=sizes, types=types, devices=2, machine=machine
    )
    assert not mixture_rules.KERNEL.default(problem).combine_under_product
    tried = list(mixture_rules.Config.candidates())
    assert any(config.combine_under_product and config.under_product for config in tried)
    for config in tried:
        config.check()
