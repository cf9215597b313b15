"""The last wave of tiles, shared by steps along the contraction (`engine/remainder.py`)."""

from __future__ import annotations

import dataclasses
import itertools
import random
import types
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P
from problems import problem
from selection import slow

import stretto as st
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError
from stretto.kernels.engine import fuse, gates, remainder
from stretto.kernels.engine.hopper.tile_config import LARGE, NARROW, TileConfig
from stretto.kernels.engine.parts import Arrival, Tile
from stretto.kernels.engine.remainder import Part, Remainder, Sharing, remainder_of, sharing_of
from stretto.kernels.fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import epilogues

SHARED = dataclasses.replace(NARROW, most_parts=4)
CONFIGS = {
    "all_gather_matmul": all_gather_matmul.Config,
    "matmul_reduce_scatter": matmul_reduce_scatter.Config,
    "matmul_all_reduce": matmul_all_reduce.Config,
}
REDUCTIONS = "matmul_reduce_scatter", "matmul_all_reduce"
STEPS = 26  # Along the contraction; of which ranges of one and of two tiles are made.


@pytest.fixture
def whatever_it_gains(monkeypatch, traces_apart):
    """Small products share their last wave, too."""
    monkeypatch.setattr(remainder, "LEAST_GAIN", -10.0)
    monkeypatch.setattr(remainder, "HELD", 2e7)


def drawn(count, seed=0):
    """Divisions of last waves of all kinds."""
    rng = random.Random(seed)
    while count:
        blocks = rng.choice((2, 3, 4, 16, 66, 99, 108, 114, 132, 148, rng.randint(2, 160)))
        steps, tiles = rng.choice((rng.randint(1, 30), rng.randint(8, 400))), rng.randint(1, 600)
        most = rng.randint(2, 9)
        skew = rng.choice((0, rng.randint(0, steps)))
        found = remainder_of(tiles, blocks, Sharing(steps=steps, most_parts=most, skew=skew))
        if found is not None:
            count -= 1
            yield found, most


def parts_of(division: Remainder):
    return [
        [division.part(block, index) for index in range(division.share(block))]
        for block in range(division.blocks)
    ]


@pytest.mark.usefixtures("whatever_it_gains")
def test_each_step_of_each_tile_is_made_once():
    for division, most in drawn(300):
        made, givers, owners = set(), {}, {}
        for block in parts_of(division):
            for part in block:
                steps = {(part.number, part.first + k) for k in range(part.steps)}
                assert part.steps > 0 and not steps & made
                made |= steps
                if part.gives:
                    givers.setdefault(part.number, []).append(part.given)
                else:
                    assert part.number not in owners and part.first == 0
                    owners[part.number] = part
        tiles, along = range(division.tiles), range(division.steps)
        assert made == {(tile, step) for tile in tiles for step in along}
        for tile, part in owners.items():
            taken = list(range(part.given, part.given + part.takes))
            assert taken == givers.get(tile, []) and part.takes < most


@pytest.mark.usefixtures("whatever_it_gains")
def test_a_block_gives_before_it_waits():
    """It owns one tile at most, after what it gives, so that nobody waits in a circle."""
    for division, _ in drawn(300, seed=1):
        for block in parts_of(division):
            gives = [part.gives for part in block]
            assert 1 not in gives[1:] and len(gives) < 4
            assert not any(part.takes for part in block[:-1])


@pytest.mark.usefixtures("whatever_it_gains")
def test_in_a_kernel_it_is_the_same():
    for division, _ in drawn(10, seed=2):
        traced = jax.jit(division.part)
        for block, parts in enumerate(parts_of(division)):
            for index, part in enumerate(parts):
                found = traced(jnp.int32(block), jnp.int32(index))
                assert tuple(map(int, found)) == tuple(part)
            whole = traced(jnp.int32(block), jnp.int32(-1))
            assert (whole.first, whole.steps) == (0, division.steps)
            assert (whole.gives, whole.takes) == (0, 0)


@pytest.mark.parametrize(
    ("tiles", "steps", "most"),
    [
        (100, 64, 4),  # There is no full wave.
        (264, 64, 4),  # There is no other one.
        (140, 64, 1),
        (140, 8, 4),  # As long as it takes to give.
        (264 - 5, 64, 4),  # Nearly full.
        (140, 2**17, 4),  # The numbers of steps do not fit.
    ],
)
def test_waves_that_are_not_shared(tiles, steps, most):
    assert remainder_of(tiles, 132, Sharing(steps=steps, most_parts=most, skew=9)) is None


@pytest.mark.parametrize(
    ("tile", "tiles", "steps", "found"),
    [  # The tiles that are shared, and by how many blocks.
        (LARGE, 800, 108, (140, 132)),  # 5120 x 13824 x 5120 on two devices: 6.06 waves.
        (NARROW, 1600, 108, (148, 132)),
        (LARGE, 800, 224, (8, 64)),  # Blocks would be too far apart along k.
        (LARGE, 1080, 80, (24, 120)),
        (LARGE, 2048, 64, None),  # 8192 x 8192 x 8192: 15.5 waves; half of one is gained.
        (LARGE, 512, 224, None),  # 2048 x 28672 x 8192: 3.9 waves.
    ],
)
def test_how_the_last_wave_is_shared(tile, tiles, steps, found):
    tile = dataclasses.replace(tile, most_parts=8)
    division = remainder_of(tiles, 132, sharing_of(tile, steps))
    assert (division and (division.tiles, division.ranges)) == found
    in_order = remainder_of(tiles, 132, sharing_of(tile, steps, full_waves=False))
    assert in_order is None or in_order.tiles < in_order.ranges


@pytest.mark.parametrize("tiles", [5, 6, 9])
@pytest.mark.usefixtures("whatever_it_gains")
def test_a_matmul_of_shared_tiles_is_exact(tiles):
    m, k, n = 128 * tiles, 64 * STEPS, 128
    assert remainder_of(tiles, 4, sharing_of(SHARED, STEPS)) is not None
    lhs, rhs = cases.operands(m, k, n, seed=tiles)
    for seed in range(3):
        with st.simulate(seed=seed, core_count=4) as report:
            out = local_matmul(
                jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16), config=SHARED, out_dtype=F32
            )
        assert report.ok, str(report)
        np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)


def fused(name, devices, tiles, seed, *, own_last=True):
    """Whether a fused matmul is exact where `tiles` of `devices` are shared by 3 blocks."""
    columns = 128 * tiles
    options = {} if name == "all_gather_matmul" else dict(own_last=own_last)
    config = CONFIGS[name](tiles=SHARED, **options)
    m, k, n = cases.whole(name, devices, 128, 64 * STEPS, columns)
    lhs, rhs = cases.operands(m, k, n, seed=seed)
    schedule = ("random", "pct", "round_robin")[seed % 3]
    with st.simulate(seed=seed, core_count=3, schedule=schedule) as report:
        out = cases.run(name, lhs, rhs, devices=devices, out_dtype=F32, config=config)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, lhs @ rhs)


@pytest.mark.parametrize(
    ("name", "own_last"),
    [("all_gather_matmul", True), *itertools.product(REDUCTIONS, (True, False))],
)
@pytest.mark.parametrize(
    ("devices", "tiles"),
    [(2, 2), slow(4, 1), slow(2, 5)],
)
@pytest.mark.usefixtures("whatever_it_gains")
def test_fused_matmuls_of_shared_tiles_are_exact(name, devices, tiles, own_last):
    assert remainder_of(devices * tiles, 3, sharing_of(SHARED, STEPS)) is not None
    for seed in range(3):
        fused(name, devices, tiles, seed, own_last=own_last)


@pytest.mark.parametrize(
    ("name", "own_last", "full_waves"),
    [
        ("matmul_reduce_scatter", True, True),
        ("matmul_reduce_scatter", False, False),
        ("matmul_all_reduce", True, False),
    ],
)
def test_an_all_reduce_does_not_share_full_waves(
    monkeypatch, traces_apart, name, own_last, full_waves
):
    """All of their sums would be sent after the last product."""
    seen = []
    monkeypatch.setattr(
        fuse, "remainder_of", lambda tiles, blocks, sharing: seen.append(sharing.full_waves)
    )
    config = CONFIGS[name](tiles=SHARED, own_last=own_last)
    lhs, rhs = cases.operands(*cases.whole(name, 2, 128, 64, 128))
    with st.simulate():
        cases.run(name, lhs, rhs, devices=2, config=config)
    assert set(seen) == {full_waves}
    assert config.result_of(problem(operation=name)).full_waves == config.full_waves


@pytest.mark.parametrize("method", ["wait", "signal"])
@pytest.mark.usefixtures("whatever_it_gains")
def test_without_the_owners_wait_or_the_givers_signal(monkeypatch, method):
    original = getattr(Semaphore, method)

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != "given_sums":
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, method, maybe)
    m, k, n = 128 * 6, 64 * STEPS, 128
    lhs, rhs = (jnp.asarray(x, BF16) for x in cases.operands(m, k, n))
    kinds = []
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=4, on_finding="record") as report:
                jax.block_until_ready(local_matmul(lhs, rhs, config=SHARED))
            kinds.append(report.kinds())
        except DeadlockError:
            kinds.append({"deadlock"})
    assert all(("race" if method == "wait" else "deadlock") in found for found in kinds), kinds


def test_more_parts_than_none():
    with pytest.raises(ValueError, match="most_parts=0 must be at least 1"):
        TileConfig(most_parts=0).check()
    with pytest.raises(ValueError, match="pairs of blocks share no tiles"):
        TileConfig(tile_m=256, most_parts=2).check()


EIGHT_BITS = TileConfig(tile_n=128, tile_k=128, num_stages=3, store_buffers=2, most_parts=4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_gather_matmul", "row"),
        slow("all_gather_matmul", "block"),
        slow("matmul_reduce_scatter", "row"),
        ("matmul_reduce_scatter", "block"),
        slow("matmul_all_reduce", "row"),
    ],
)
@pytest.mark.usefixtures("whatever_it_gains")
def test_scaled_matmuls_of_shared_tiles_are_exact(name, kind):
    """Each block scales what it gives; and what the first chunk of a shard proves holds for all."""
    config = CONFIGS[name](tiles=EIGHT_BITS)
    shape = (128, 128 * 20, 256)
    assert remainder_of(4, 3, sharing_of(EIGHT_BITS, 20)) is not None
    for seed in range(2):
        with st.simulate(seed=seed, core_count=3) as report:
            out, want = scaled_cases.run(name, kind, 2, shape, config=config)
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("whatever_it_gains")
def test_an_epilogue_of_shared_tiles(gated):
    """Its owner applies it, to the whole sum; what is given has none, nor its arrays."""
    config, sides = all_gather_matmul.Config(tiles=SHARED), 1 + gated
    columns = 256 if gated else 512
    lhs, rhs = cases.operands(256, 64 * STEPS, columns * sides)
    bias = cases.whole_numbers(9, columns)
    specs = (P("x"), *[P(None, "x")] * sides, P("x"))

    def body(x, *rest):
        *weights, b = rest
        chain = (epilogues.gated(lambda u: u, None, b),) if gated else ("relu", epilogues.bias(b))
        return st.all_gather_matmul(
            x,
            tuple(weights) if gated else weights[0],
            "x",
            epilogue=epilogues.chain(*chain),
            backend="pallas",
            out_dtype=F32,
            config=config,
        )

    program = jax.jit(
        jax.shard_map(
            body,
            mesh=cases.mesh_of(2),
            in_specs=specs,
            out_specs=P(None, "x"),
            check_vma=False,
        )
    )
    weights = np.split(rhs, sides, axis=1)
    products = [lhs @ w for w in weights]
    want = products[0] * (products[1] + bias) if gated else np.maximum(products[0], 0) + bias
    for seed in range(2):
        with st.simulate(seed=seed, core_count=3) as report:
            out = program(lhs.astype(BF16), *(w.astype(BF16) for w in weights), bias)
        assert report.ok, str(report)
        np.testing.assert_array_equal(np.asarray(out), want)


def test_a_part_waits_for_the_gates_before_it_too(monkeypatch):
    """The first gate of a shard stands for its scales, which a part needs as a whole tile does."""
    asked = []
    tile = Tile(0, 0, 0, part=Part(first=5, steps=4, gives=1, given=0, takes=0, number=0))
    block: Any = types.SimpleNamespace(
        num_tiles=1,
        tile=lambda i: tile,
        k_tiles=lambda tile: tile.part.steps,
        parts=types.SimpleNamespace(k_tiles=20),
    )
    barriers: Any = types.SimpleNamespace(at=range(gates.SLOTS))
    arrival = Arrival(columns=256, wait=lambda tile, gate: asked.append(gate))

    def loop(first, last, body, carry):
        for i in range(first, last):
            carry = body(i, carry)
        return carry

    monkeypatch.setattr(gates.lax, "fori_loop", loop)
    for name in ("barrier_wait", "barrier_arrive"):
        monkeypatch.setattr(gates.plgpu, name, lambda barrier: None)
    gates.Gates(block, arrival, 128, opened=barriers, passed=barriers).poll(lambda: None)
    assert asked == [0, 1, 2, 3, 4]  # Two tiles a gate: its own are those from 2 on.
