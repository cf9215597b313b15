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
        cluster_size=draw(some.sampled_from([1, 2])),
    )


def whole(order, devices):
    """All tiles of a device, in the order of its work, with the rank in the cluster."""
    groups = devices * order.m_groups * order.n_tiles
    ranks = range(order.config.cluster_size)
    return [[order.locate(group, rank) for rank in ranks] for group in range(groups)]


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
    flat = list(itertools.chain.from_iterable(tiles))
    assert len(flat) == len(set(flat)) == devices * order.tiles_per_shard
    assert set(flat) == every_tile(order, devices)
    steps = [step for step, _, _ in flat]
    assert steps == sorted(steps)


@given(some.integers(1, 3000), some.integers(1, 1500), configs())
def test_the_tiles_cover_the_shard(m_shard, n, config):
    order = ShardOrder(m_shard, n, config)
    assert order.m_tiles * config.tile_m >= m_shard
    assert order.n_tiles * config.tile_n >= n
    assert (order.m_tiles - config.cluster_size) * config.tile_m < m_shard
    assert (order.n_tiles - 1) * config.tile_n < n
    numbers = {order.index(m, n) for m in range(order.m_tiles) for n in range(order.n_tiles)}
    assert numbers == set(range(order.tiles_per_shard))


@given(some.integers(1, 3000), some.integers(1, 1500), configs(), some.integers(1, 8))
def test_neighbours_in_a_cluster_share_columns(m_shard, n, config, devices):
    for tiles in whole(ShardOrder(m_shard, n, config), devices):
        steps, rows, columns = zip(*tiles, strict=True)
        assert len(set(steps)) == len(set(columns)) == 1
        assert list(rows) == list(range(rows[0], rows[0] + config.cluster_size))


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
    flat = list(itertools.chain.from_iterable(whole(order, order.size)))
    assert len(flat) == len(set(flat))
    assert set(flat) == every_tile(order, order.size)


@given(scatters)
def test_own_tiles_come_after_all_peers_tiles_of_their_rows(order):
    """Else a device could wait for a part that a peer computes only after waiting itself."""
    position = {}
    for number, tiles in enumerate(whole(order, order.size)):
        for tile in tiles:
            position[tile] = number
    own = order.size - 1
    for (step, m, n), number in position.items():
        if step == own:
            assert all(position[peer, m, n] < number for peer in range(own))


@given(scatters)
def test_a_rounds_own_rows_come_a_round_late(order):
    """When a device turns to its own rows, the peers have had a round to send their parts."""
    own = order.size - 1
    height = order.m_groups // order.rounds * order.config.cluster_size
    assert order.m_groups % order.rounds == 0 and order.rounds <= order.max_rounds
    seen = []
    for (step, m, _), *_ in whole(order, order.size):
        entry = (step == own, m // height)
        if not seen or seen[-1] != entry:
            seen.append(entry)
    if order.size > 1:
        first = [(False, 0)]
        rounds = [((False, r), (True, r - 1)) for r in range(1, order.rounds)]
        want = [*first, *itertools.chain.from_iterable(rounds), (True, order.rounds - 1)]
        assert seen == want


@given(scatters, some.data())
def test_an_order_in_a_kernel_is_that_of_python(order, data):
    groups = order.size * order.m_groups * order.n_tiles
    group = data.draw(some.integers(0, groups - 1))
    for kind in (order, ShardOrder(order.m_shard, order.n, order.config)):
        found = kind.locate(jnp.int32(group), jnp.int32(0))
        assert tuple(map(int, found)) == kind.locate(group, 0)
