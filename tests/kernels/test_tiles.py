"""The order of tiles: every tile once, shard after shard."""

from __future__ import annotations

import itertools
import statistics

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as some

from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.orders import OwnersOrder, ShardOrder, raster

counts = some.integers(1, 12)


def place(order, index):
    """Step, row and column of the tile at `index`."""
    return order.locate(index)[:3]


@some.composite
def configs(draw):
    return TileConfig(
        tile_m=128,
        tile_n=draw(some.sampled_from([64, 128, 192, 256])),
        raster_width=draw(some.integers(1, 20)),
    )


def whole(order, devices):
    """All tiles of a device, in the order of its work."""
    return [place(order, index) for index in range(devices * order.tiles_per_shard)]


def every_tile(order, devices):
    return set(itertools.product(range(devices), range(order.m_tiles), range(order.n_tiles)))


@given(counts, counts, some.integers(1, 20))
def test_raster_is_a_bijection(m_tiles, n_tiles, width):
    found = [raster(i, m_tiles, n_tiles, width) for i in range(m_tiles * n_tiles)]
    assert set(found) == set(itertools.product(range(m_tiles), range(n_tiles)))
    assert len(found) == len(set(found))


@given(counts, counts, some.integers(1, 20))
def test_neighbours_in_the_raster_share_an_operand(m_tiles, n_tiles, width):
    """Inside a band consecutive tiles are in one row or in one column."""
    found = [raster(i, m_tiles, n_tiles, width) for i in range(m_tiles * n_tiles)]
    for (m, n), (next_m, next_n) in itertools.pairwise(found):
        if m // width == next_m // width:
            assert abs(m - next_m) + abs(n - next_n) == 1


@given(some.integers(1, 3000), some.integers(1, 1500), configs(), some.integers(1, 8))
def test_shard_order_is_a_bijection_shard_after_shard(m_shard, n, config, devices):
    order = ShardOrder(m_shard, n, config)
    tiles = whole(order, devices)
    assert len(tiles) == len(set(tiles)) == devices * order.tiles_per_shard
    assert set(tiles) == every_tile(order, devices)
    steps = [step for step, _, _ in tiles]
    assert steps == sorted(steps)


@given(some.integers(1, 3000), some.integers(1, 1500), configs())
def test_the_tiles_cover_the_shard(m_shard, n, config):
    order = ShardOrder(m_shard, n, config)
    assert order.m_tiles * config.tile_m >= m_shard
    assert order.n_tiles * config.tile_n >= n
    assert (order.m_tiles - 1) * config.tile_m < m_shard
    assert (order.n_tiles - 1) * config.tile_n < n
    numbers = {order.index(m, n) for m in range(order.m_tiles) for n in range(order.n_tiles)}
    assert numbers == set(range(order.tiles_per_shard))


orders = some.builds(ShardOrder, some.integers(1, 3000), some.integers(1, 1500), configs())


@given(orders, some.integers(1, 64), some.data())
def test_an_order_in_a_kernel_is_that_of_python(order, devices, data):
    index = data.draw(some.integers(0, devices * order.tiles_per_shard - 1))
    assert tuple(map(int, place(order, jnp.int32(index)))) == place(order, index)


owners_orders = some.builds(
    OwnersOrder,
    orders,
    size=some.integers(2, 8),
    num_blocks=some.sampled_from([1, 4, 7, 132]),
    lag=some.integers(0, 20),
)


@given(owners_orders)
def test_owners_make_every_tile_once(order):
    tiles = [place(order, index) for index in range(order.num_tiles)]
    assert len(tiles) == len(set(tiles))
    assert set(tiles) == every_tile(order.shard, order.size)
    numbers = range(order.peers * order.shard.tiles_per_shard)
    for_peers = [order.locate_for_peers(number)[:3] for number in numbers]
    assert set(for_peers) == {tile for tile in tiles if tile[0] < order.peers}


@given(owners_orders)
def test_what_a_tile_waits_for_was_begun_before_it(order):
    """An own tile comes in no earlier wave than the peers' same tile, which it waits for."""
    waves = {place(order, i): i // order.num_blocks for i in range(order.num_tiles)}
    for m, n in itertools.product(range(order.shard.m_tiles), range(order.shard.n_tiles)):
        peers_waves = [waves[step, m, n] for step in range(order.peers)]
        assert max(peers_waves) <= waves[order.peers, m, n]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("lag", [1, 3])
def test_own_tiles_lag_behind_by_so_many_waves(size, lag):
    order = OwnersOrder(ShardOrder(16384 // size, 16384, TileConfig()), size, 132, lag=lag)
    places = {place(order, i): i / 132 for i in range(order.num_tiles)}
    lags = [
        places[order.peers, m, n] - max(places[step, m, n] for step in range(order.peers))
        for m, n in itertools.product(range(order.shard.m_tiles), range(order.shard.n_tiles))
    ]
    assert lag - 0.1 < statistics.median(lags) < lag + 1


@given(orders, some.integers(2, 8))
def test_own_tiles_come_last_without_a_lag(shard, size):
    order = OwnersOrder(shard, size, num_blocks=132, lag=None)
    steps = [place(order, index)[0] for index in range(order.num_tiles)]
    assert steps.index(order.peers) == order.peers * shard.tiles_per_shard


@given(owners_orders, some.data())
def test_owners_order_in_a_kernel_is_that_of_python(order, data):
    index = data.draw(some.integers(0, order.num_tiles - 1))
    assert tuple(map(int, place(order, jnp.int32(index)))) == place(order, index)


def test_own_tiles_are_spread_over_the_blocks_of_a_wave():
    """Of every full wave in the middle, a `size`-th is the device's own, in other blocks each."""
    order = OwnersOrder(ShardOrder(2048, 8192, TileConfig()), 4, 132, lag=3)
    waves = [
        [block for block in range(132) if place(order, wave * 132 + block)[0] == 3]
        for wave in range(4, 12)
    ]
    assert {len(blocks) for blocks in waves} == {33}
    assert all(not set(one) & set(next_one) for one, next_one in itertools.pairwise(waves))
