"""Orders and contractions that only the kernel knows, while it runs, in the simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_matmul
from fused_cases import whole_numbers

import stretto as st
from stretto.kernels.engine import gates
from stretto.kernels.engine.parts import Arrival, Stream, Tile

M, N = 136, 192
# The contraction of each group: one has none, some less than the ring, one goes round it twice.
SIZES = (128, 0, 64, 512)
GROUPS = (2, 1, 3)  # One is left out.


def check(seed, core_count, *, addend=False, scale=False, **options):
    lhs, rhs = whole_numbers(seed, M, sum(SIZES)), whole_numbers(seed + 1, sum(SIZES), N)
    add = whole_numbers(seed + 2, len(SIZES), M, N) if addend else None
    epilogue = _times_its_place if scale else None

    def call(lhs, rhs, sizes, groups, add):
        return ragged_matmul.ragged_matmul(
            lhs, rhs, sizes, groups, addend=add, epilogue=epilogue, **options
        )

    with st.simulate(seed=seed, core_count=core_count) as report:
        out = jax.jit(call)(
            jnp.asarray(lhs, jnp.bfloat16),
            jnp.asarray(rhs, jnp.bfloat16),
            jnp.asarray(SIZES, jnp.int32),
            jnp.asarray(GROUPS, jnp.int32),
            add,
        )
    assert report.ok, str(report)
    ends = np.cumsum(SIZES)
    for group in GROUPS:
        inside = slice(ends[group] - SIZES[group], ends[group])
        expected = lhs[:, inside] @ rhs[inside] + (0 if add is None else add[group])
        if scale:
            expected = expected * (group + np.arange(M)[:, None] // 64 + np.arange(N) // 32)
        np.testing.assert_array_equal(np.asarray(out[group]), expected, err_msg=f"group {group}")


def _times_its_place(piece, tile, row, column):
    """An epilogue that sees its tile: pieces are 64 rows x 128 bytes of float32."""
    factor = tile.step + 2 * tile.m + row // 64 + 4 * tile.n + column // 32
    return piece * factor.astype(jnp.float32)


@pytest.mark.parametrize("core_count", [1, 3])
def test_groups_in_their_order_with_contractions_of_their_own(core_count):
    check(core_count, core_count)


@pytest.mark.parametrize("columns", [(128, None), (None, 64), (64, 192)])
def test_gates_of_contractions_of_any_length(columns):
    """Tiles have one gate, several, or none."""
    check(5, 2, columns_per_gate=columns)


def test_addends_of_contractions_of_any_length():
    check(7, 2, addend=True)


def test_an_epilogue_sees_where_its_piece_lies():
    check(9, 2, scale=True)


def test_streams_that_wait_at_different_distances_wait_together():
    """Each is asked for its own gates only, at the first common one of each."""
    asked = []

    def stream(name, columns):
        arrival = Arrival(columns=columns, wait=lambda tile, gate: asked.append((name, int(gate))))
        return Stream(load=lambda *_: None, arrival=arrival)

    arrival = gates.arrival_of([stream("lhs", 64), stream("rhs", 64)])
    for gate in range(2):
        arrival.wait(Tile(0, 0, 0), gate)
    assert arrival.columns == 64
    assert asked == [("lhs", 0), ("rhs", 0), ("lhs", 1), ("rhs", 1)]
    assert gates.arrival_of([stream("lhs", 128), stream("rhs", 192)]).columns == 64
