"""The integers of the protocols: who works on which shard when, and how shards are cut up."""

from __future__ import annotations

import collections
import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as some

from stretto.distributed import schedule
from stretto.distributed.schedule import BandedPullPlan, PullPlan

sizes = some.integers(1, 64)


@given(sizes)
def test_every_device_works_on_every_shard_once_and_on_its_own_first(size):
    for device in range(size):
        shards = [schedule.shard_of_step(device, step, size) for step in range(size)]
        assert sorted(shards) == list(range(size))
        assert shards[0] == device


@given(sizes)
def test_no_two_devices_ask_one_peer_at_the_same_step(size):
    for step in range(size):
        assert len({schedule.shard_of_step(device, step, size) for device in range(size)}) == size


@given(sizes)
def test_in_a_scatter_ones_own_shard_is_last_and_everybody_knows_who_makes_what(size):
    """A device makes its successors' shards in turn; the owner finds step s at `-(s + 1)`."""
    for device in range(size):
        owners = [schedule.shard_of_step(device, step + 1, size) for step in range(size)]
        assert sorted(owners) == list(range(size)) and owners[-1] == device
        for step, owner in enumerate(owners[:-1]):
            assert (owner - (step + 1)) % size == device


@given(some.integers(0, 10_000), some.integers(1, 200))
def test_shares_add_up_and_differ_by_one_at_most(total, parts):
    shares = [schedule.share(total, part, parts) for part in range(parts)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == [len(range(part, total, parts)) for part in range(parts)]


@given(some.integers(0, 2**31 - 1), some.integers(1, 2**31 - 1))
def test_division_in_a_kernel_is_that_of_python(a, b):
    assert int(schedule.div(jnp.int32(a), b)) == schedule.div(a, b) == a // b
    assert int(schedule.rem(jnp.int32(a), b)) == schedule.rem(a, b) == a % b
    assert schedule.ceil_div(a, b) == (a + b - 1) // b


@given(some.booleans(), some.integers(-9, 9), some.integers(-9, 9))
def test_where_in_a_kernel_is_that_of_python(condition, a, b):
    want = a if condition else b
    assert schedule.where(condition, a, b) == want
    assert int(schedule.where(jnp.bool_(condition), a, jnp.int32(b))) == want


@some.composite
def plans(draw):
    """Plans of any size, also of pieces that are larger than the shard."""
    piece_columns = draw(some.integers(1, 40))
    return PullPlan(
        rows=draw(some.integers(1, 90)),
        columns=draw(some.integers(1, 200)),
        piece_rows=draw(some.integers(1, 40)),
        piece_columns=piece_columns,
        chunk_columns=piece_columns * draw(some.integers(1, 5)),
    )


@given(plans())
def test_pieces_tile_the_shard_exactly(plan):
    corners = [plan.locate(piece)[:2] for piece in range(plan.pieces)]
    rows = range(0, plan.rows, plan.piece_rows)
    columns = range(0, plan.columns, plan.piece_columns)
    assert sorted(corners) == [(r, c) for r in rows for c in columns]


@given(plans())
def test_pieces_of_a_chunk_add_up(plan):
    found = collections.Counter(plan.locate(piece)[2] for piece in range(plan.pieces))
    assert found == {chunk: plan.pieces_in_chunk(chunk) for chunk in range(plan.chunks)}


@given(plans())
def test_chunks_are_their_columns_and_come_in_order(plan):
    chunks = []
    for piece in range(plan.pieces):
        _, column, chunk = plan.locate(piece)
        assert chunk == column // plan.chunk_columns
        assert column + plan.piece_columns <= (chunk + 1) * plan.chunk_columns
        chunks.append(chunk)
    assert chunks == sorted(chunks)


@given(plans(), some.integers(1, 4))
def test_pieces_follow_one_another_shard_after_shard(plan, shards):
    found = [plan.piece_of(index) for index in range(shards * plan.pieces)]
    assert found == [(shard, p) for shard in range(shards) for p in range(plan.pieces)]


@given(plans(), some.data())
def test_a_plan_in_a_kernel_is_that_of_python(plan, data):
    piece = data.draw(some.integers(0, plan.pieces - 1))
    assert tuple(map(int, plan.locate(jnp.int32(piece)))) == plan.locate(piece)
    chunk = data.draw(some.integers(0, plan.chunks - 1))
    assert int(plan.pieces_in_chunk(jnp.int32(chunk))) == plan.pieces_in_chunk(chunk)


@some.composite
def banded_plans(draw):
    piece_rows = draw(some.integers(1, 9))
    chunk_rows = piece_rows * draw(some.integers(1, 4))
    return BandedPullPlan(
        sources=draw(some.integers(1, 4)),
        rows=draw(some.integers(1, 90)),
        columns=draw(some.integers(1, 90)),
        piece_rows=piece_rows,
        piece_columns=draw(some.integers(5, 40)),
        chunk_rows=chunk_rows,
        band_rows=chunk_rows * draw(some.integers(1, 3)),
    )


@given(banded_plans())
def test_banded_pieces_tile_every_shard_exactly_band_after_band(plan):
    places = [plan.locate(index)[:3] for index in range(plan.pieces)]
    corners = (
        range(plan.sources),
        range(0, plan.rows, plan.piece_rows),
        range(0, plan.columns, plan.piece_columns),
    )
    assert sorted(places) == list(itertools.product(*corners))
    order = [(row // plan.band_rows, source, row, column) for source, row, column in places]
    assert order == sorted(order)


@given(banded_plans())
def test_banded_chunks_are_their_rows_and_add_up(plan):
    places = [plan.locate(index) for index in range(plan.pieces)]
    assert all(chunk == row // plan.chunk_rows for _, row, _, chunk in places)
    found = collections.Counter((source, chunk) for source, _, _, chunk in places)
    assert found == {
        (source, chunk): plan.pieces_in_chunk(chunk)
        for source in range(plan.sources)
        for chunk in range(plan.chunks)
    }


@given(banded_plans(), some.data())
def test_a_banded_plan_in_a_kernel_is_that_of_python(plan, data):
    index = data.draw(some.integers(0, plan.pieces - 1))
    assert tuple(map(int, plan.locate(jnp.int32(index)))) == plan.locate(index)
    chunk = data.draw(some.integers(0, plan.chunks - 1))
    assert int(plan.pieces_in_chunk(jnp.int32(chunk))) == plan.pieces_in_chunk(chunk)


def test_bands_and_chunks_of_broken_pieces_are_refused():
    sizes = dict(sources=1, rows=1, columns=1, piece_rows=4, piece_columns=8)
    with pytest.raises(ValueError, match=r"chunk_rows=6 must be a multiple of piece_rows=4"):
        BandedPullPlan(chunk_rows=6, band_rows=6, **sizes)
    with pytest.raises(ValueError, match=r"band_rows=12 must be a multiple of chunk_rows=8"):
        BandedPullPlan(chunk_rows=8, band_rows=12, **sizes)


def test_offsets_of_a_shard_of_more_than_2_to_the_31_elements():
    """Places are counted in rows and columns, which fit an int32 where elements do not (B47)."""
    plan = PullPlan(
        rows=1 << 20, columns=1 << 14, piece_rows=64, piece_columns=256, chunk_columns=1024
    )
    last = plan.pieces - 1
    want = ((1 << 20) - 64, (1 << 14) - 256, plan.chunks - 1)
    assert plan.locate(last) == want
    assert tuple(map(int, plan.locate(jnp.int32(last)))) == want


def test_a_chunk_of_broken_pieces_is_refused():
    with pytest.raises(ValueError, match=r"chunk_columns=100 must be a multiple of piece_col"):
        PullPlan(rows=1, columns=1, piece_rows=1, piece_columns=64, chunk_columns=100)
