"""The order of tiles: every tile once, shard after shard."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as some

from stretto.kernels.tile_config import TileConfig
from stretto.kernels.tiles import ShardOrder, raster

counts = some.integers(1, 12)


@some.composite
def configs(draw):
    return TileConfig(
        tile_m=128,
        tile_n=draw(some.sampled_from([64, 128, 192, 256])),
        raster_width=draw(some.integers(1, 20)),
    )


def whole(order, devices):
    """All tiles of a device, in the order of its work."""
    return [order.locate(index) for index in range(devices * order.tiles_per_shard)]


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
    assert tuple(map(int, order.locate(jnp.int32(index)))) == order.locate(index)
