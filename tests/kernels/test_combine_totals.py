"""`expert_combine` whose kernel adds up the sums of the devices, too; seeded bugs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import Without, combined, rows_to_combine
from fused_cases import BF16, F32
from jax import lax
from jax.experimental import pallas as pl
from selection import slow

import stretto as st
from stretto.distributed import semaphores
from stretto.distributed.simulator import SimulationError
from stretto.kernels.collectives import combine, summing, token_sums, token_totals
from stretto.kernels.collectives.token_tables import Row


def config(warpgroups: int = 2, **options) -> combine.Config:
    return combine.Config(totals=True, warpgroups=warpgroups, chunk=8, **options)


@pytest.mark.parametrize(
    ("devices", "seed", "width", "warpgroups", "wire"),
    [(2, 0, 64, 2, None), (4, 1, 72, 3, F32), slow(2, 2, 192, 4, None)]
    + [slow(d, s, 64, (2, 4)[s % 2], None) for d in (2, 4, 8) for s in range(20)],
)
def test_sums(devices, seed, width, warpgroups, wire):
    """Also of rows that are padded in shared memory, and in a second call with other tables."""
    with st.simulate(seed=seed, core_count=2) as report:
        program = combined(devices, wire_dtype=wire, config=config(warpgroups))
        for none in (0.3, 1.0, 0.9):
            given, wanted = rows_to_combine(devices, seed, width, none)
            found = np.asarray(program(*given), np.float32)
            np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))
    assert report.ok, str(report)


@pytest.mark.parametrize("devices", [2, 4])
def test_the_bits_are_those_of_two_steps(devices):
    """Of numbers that round; on each device and over devices in the same order."""
    (rows, _, positions), _ = rows_to_combine(devices, 5, 64)
    rows = jax.random.normal(jax.random.key(0), rows.shape, BF16)
    weights = jax.random.uniform(jax.random.key(1), positions.shape)
    with st.simulate(core_count=3) as report:
        outs = [
            np.asarray(combined(devices, config=how)(rows, weights, positions), np.float32)
            for how in (config(), combine.Config())
        ]
    assert report.ok, str(report)
    np.testing.assert_array_equal(*outs)


def test_one_device_has_no_peers():
    given, wanted = rows_to_combine(1, 0, 64)
    with st.simulate(core_count=2) as report:
        found = np.asarray(combined(1, config=config())(*given), np.float32)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))


def test_one_warpgroup_cannot_do_both():
    with pytest.raises(ValueError, match="warpgroups=1 must be 2 or more with totals"):
        combine.Config(totals=True).check()


def is_found() -> bool:
    """Whether the simulator finds anything in some of its orders."""
    given, _ = rows_to_combine(2, 0, 64)
    faulty = combined(2, config=config(), backend="simulator")
    for seed in range(4):
        try:
            with st.simulate(seed=seed, core_count=1, on_finding="record") as report:
                jax.block_until_ready(faulty(*given))
            if not report.ok:
                return True
        except SimulationError:
            return True
    return False


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (token_totals, "barrier_wait"),
        (token_totals, "wait_smem_to_gmem"),
        (token_totals, "commit_smem"),
        (token_sums, "barrier_wait"),
        (token_sums, "wait_smem_to_gmem"),
    ],
)
def test_each_wait_is_needed(monkeypatch, traces_apart, module, name):
    monkeypatch.setattr(module, "plgpu", Without(module.plgpu, name))
    assert is_found()


def test_the_wait_for_a_chunk_is_needed(monkeypatch, traces_apart):
    wait = semaphores.Semaphore.wait

    def without(self, *args, **kwargs):
        if self.site.semaphore != "arrived":
            wait(self, *args, **kwargs)

    monkeypatch.setattr(semaphores.Semaphore, "wait", without)
    assert is_found()


def test_a_chunk_is_told_when_it_is_in_place(monkeypatch, traces_apart):
    """Not as soon as its last sum is on its way."""

    def early(self, i):
        each = self.how.chunks.tokens * self.how.pieces
        pl.when(lax.rem(i + 1, each) == 0)(lambda: self._tell(lax.div(i, each)))

    monkeypatch.setattr(token_sums.Sums, "_tell_before", early)
    assert is_found()


@pytest.mark.parametrize("totals", [False, True])
def test_rows_in_registers(totals):
    """Also in several pieces; rows of no multiple of 2 KB go through shared memory."""
    how = combine.Config(direct=True, totals=totals, warpgroups=2, chunk=8)
    for width in (1024, 3072, 192):
        given, wanted = rows_to_combine(2, 0, width)
        with st.simulate(core_count=2) as report:
            found = np.asarray(combined(2, config=how)(*given), np.float32)
        assert report.ok, str(report)
        np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))


@pytest.mark.parametrize(
    ("width", "top_k", "warpgroups", "elements"),
    [
        (2048, 8, 3, 2048),
        (2048, 8, 4, 1024),
        (4096, 2, 4, 4096),
        (7168, 8, 2, 1024),
        (2880, 4, 2, None),
        (64, 2, 2, None),
    ],
)
def test_pieces_in_registers(width, top_k, warpgroups, elements):
    """The largest that leaves a thread enough registers."""
    row = Row.of(width, 2)
    piece = summing.direct_piece(row, 2, top_k, warpgroups)
    assert (None if piece is None else piece.parts * row.columns) == elements
