"""The order of tiles: every tile once, and the peers' before one's own."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as some

from stretto.kernels.tile_config import TileConfig
from stretto.kernels.tiles import ScatterOrder, ShardOrder, raster

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


scatters = some.builds(
    ScatterOrder,
    some.integers(1, 3000),
    some.integers(1, 1500),
    configs(),
    some.integers(1, 64),
    some.integers(1, 6),
)


@given(scatters)
def test_scatter_order_is_a_bijection(order):
    tiles = whole(order, order.size)
    assert len(tiles) == len(set(tiles))
    assert set(tiles) == every_tile(order, order.size)


@given(scatters)
def test_own_tiles_come_after_all_peers_tiles_of_their_rows(order):
    """Else a device could wait for a part that a peer computes only after waiting itself."""
    position = {tile: number for number, tile in enumerate(whole(order, order.size))}
    own = order.size - 1
    for (step, m, n), number in position.items():
        if step == own:
            assert all(position[peer, m, n] < number for peer in range(own))


@given(scatters)
def test_a_rounds_own_rows_come_a_round_late(order):
    """When a device turns to its own rows, the peers have had a round to send their parts."""
    own = order.size - 1
    height = order.m_tiles // order.rounds
    assert order.m_tiles % order.rounds == 0 and order.rounds <= order.max_rounds
    seen = []
    for step, m, _ in whole(order, order.size):
        entry = (step == own, m // height)
        if not seen or seen[-1] != entry:
            seen.append(entry)
    if order.size > 1:
        first = [(False, 0)]
        rounds = [((False, r), (True, r - 1)) for r in range(1, order.rounds)]
        want = [*first, *itertools.chain.from_iterable(rounds), (True, order.rounds - 1)]
        assert seen == want


@given(scatters)
def test_the_peers_tiles_are_the_list_without_ones_own(order):
    """A device fetches in the order in which its peers make what it fetches."""
    own = order.size - 1
    fetched = [order.locate_of_peers(index) for index in range(own * order.tiles_per_shard)]
    assert fetched == [tile for tile in whole(order, order.size) if tile[0] != own]


@given(scatters, some.data())
def test_an_order_in_a_kernel_is_that_of_python(order, data):
    index = data.draw(some.integers(0, order.size * order.tiles_per_shard - 1))
    for kind in (order, ShardOrder(order.m_shard, order.n, order.config)):
        assert tuple(map(int, kind.locate(jnp.int32(index)))) == kind.locate(index)
    if order.size > 1:
        index %= (order.size - 1) * order.tiles_per_shard
        found = order.locate_of_peers(jnp.int32(index))
        assert tuple(map(int, found)) == order.locate_of_peers(index)
