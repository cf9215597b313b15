"""`expert_combine` by rings of rows, with XLA's addition over devices or the kernel's; bugs."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import Without, combined, rows_to_combine
from fused_cases import BF16, F32
from jax import lax
from jax.experimental import pallas as pl
from problems import problem
from selection import slow

import stretto as st
from stretto.distributed import handshake, semaphores
from stretto.distributed.simulator import SimulationError
from stretto.distributed.team import Team
from stretto.kernels.collectives import combine, fed_sums, summing, token_sums, token_totals
from stretto.kernels.collectives.token_tables import Chunks, Row


def config(
    warpgroups: int = 2, *, totals: bool = True, slots: int = 4, chunk: int = 8
) -> combine.Config:
    return combine.Config(warpgroups=warpgroups, totals=totals, chunk=chunk, slots=slots)


@pytest.mark.parametrize(
    ("devices", "seed", "width", "warpgroups", "totals", "wire"),
    [(2, 0, 64, 2, True, None), (4, 1, 72, 3, True, F32), (2, 2, 1024, 2, False, None)]
    + [slow(1, 3, 72, 1, False, None), slow(2, 2, 192, 4, True, None)]
    + [slow(d, s, 64, (2, 4)[s % 2], s % 3, None) for d in (2, 4, 8) for s in range(20)],
)
def test_sums(devices, seed, width, warpgroups, totals, wire):
    """Also of rows that are padded in shared memory, and in a second call with other tables."""
    how = config(warpgroups, totals=bool(totals), slots=(2, 3, 16)[seed % 3])
    with st.simulate(seed=seed, core_count=2) as report:
        program = combined(devices, wire_dtype=wire, config=how)
        for none in (0.3, 1.0, 0.9):
            given, wanted = rows_to_combine(devices, seed, width, none)
            found = np.asarray(program(*given), np.float32)
            np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))
    assert report.ok, str(report)


@pytest.mark.parametrize("devices", [2, 4])
def test_the_bits_are_the_same_in_all_ways(devices):
    """Of numbers that round; on each device and over devices in the same order."""
    (rows, _, positions), _ = rows_to_combine(devices, 5, 64)
    rows = jax.random.normal(jax.random.key(0), rows.shape, BF16)
    weights = jax.random.uniform(jax.random.key(1), positions.shape)
    with st.simulate(core_count=3) as report:
        first, *others = [
            np.asarray(combined(devices, config=how)(rows, weights, positions), np.float32)
            for how in (combine.Config(), config(totals=False), config())
        ]
    assert report.ok, str(report)
    for other in others:
        np.testing.assert_array_equal(first, other)


def is_found() -> bool:
    """Whether the simulator finds anything in some of its orders."""
    given, _ = rows_to_combine(2, 0, 72)
    faulty = combined(2, config=config(chunk=4), backend="simulator")
    for seed in range(4):
        try:
            with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
                jax.block_until_ready(faulty(*given))
            if not report.ok:
                return True
        except SimulationError:
            return True
    return False


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (fed_sums, "barrier_wait"),
        (fed_sums, "barrier_arrive"),
        (fed_sums, "commit_smem"),
        (token_totals, "barrier_wait"),
        (token_totals, "barrier_arrive"),
        (token_totals, "wait_smem_to_gmem"),
        (token_totals, "commit_smem"),
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


@pytest.mark.parametrize("chunk", [2, 8])
@pytest.mark.parametrize("devices", [2, 4])
def test_a_start_by_counters(devices, chunk):
    """Where multiprocessors are left. Each launch leaves the semaphores of its chunks at zero."""
    given, wanted = rows_to_combine(devices, 4, 64)
    how = combine.Config(warpgroups=2, totals=True, chunk=chunk, num_blocks=2, slots=4)
    for seed in range(2):
        with st.simulate(seed=seed, core_count=4) as report:
            for _ in range(2):
                found = np.asarray(combined(devices, config=how)(*given), np.float32)
        assert report.ok and report.launches == 2, str(report)
        np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))


@pytest.mark.parametrize("name", ["arrive", "wait", "wait_at_end"])
def test_each_step_of_the_handshake_is_needed(monkeypatch, traces_apart, name):
    monkeypatch.setattr(handshake.Handshake, name, lambda self: None)
    given, _ = rows_to_combine(2, 0, 72)
    how = combine.Config(warpgroups=2, totals=True, chunk=8, num_blocks=2, slots=4)
    faulty = combined(2, config=how, backend="simulator")
    with pytest.raises(SimulationError):
        for seed in range(6):
            with st.simulate(seed=seed, core_count=4):
                for _ in range(2):
                    jax.block_until_ready(faulty(*given))


@pytest.mark.parametrize("name", ["_enter_tables", "_leave_tables", "_free_all"])
def test_tables_and_slots_are_handed_over(monkeypatch, traces_apart, name):
    monkeypatch.setattr(fed_sums.FedSums, name, lambda self, *args: None)
    assert is_found()


def test_a_chunk_is_told_when_it_is_in_place(monkeypatch, traces_apart):
    """Not as soon as its last sum is on its way."""

    def early(self, i):
        each = self.how.chunks.tokens * self.how.pieces
        pl.when(lax.rem(i + 1, each) == 0)(lambda: self._tell(lax.div(i, each)))

    monkeypatch.setattr(token_sums.Sums, "_tell_before", early)
    assert is_found()


@pytest.mark.parametrize(("tokens", "chunk"), [(4096, 4), (8190, 4), (8192, 8), (16384, 8)])
def test_chunks_of_fewer_tokens_are_shorter(tokens, chunk):
    """The first and the last chunk of a device are a larger part of its time."""
    asked = problem(operation="expert_combine", devices=2)
    sizes = dict(t=tokens, d=2048, top_k=8, rows=tokens * 8)
    found = combine.default_config(dataclasses.replace(asked, sizes=sizes))
    assert (found.totals, found.chunk) == (True, chunk)


def test_one_device_has_no_peers():
    given, wanted = rows_to_combine(1, 0, 64)
    with st.simulate(core_count=2) as report:
        found = np.asarray(combined(1, config=config())(*given), np.float32)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(wanted, BF16), np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(senders=-1), "senders=-1 must be at least 0, and less than num_blocks=1024"),
        (dict(senders=4, num_blocks=4), "senders=4 must be at least 0, and less than num_blocks=4"),
        (dict(slots=1), "slots=1 must be between 2 and 32"),
        (dict(slots=33), "slots=33 must be between 2 and 32"),
    ],
)
def test_configurations_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        combine.Config(**options).check()


@pytest.mark.parametrize(
    ("width", "top_k", "totals", "warpgroups", "elements", "slots"),
    [
        (2048, 8, True, 2, 2048, 16),
        (4096, 2, True, 2, 4096, 4),
        (7168, 8, False, 2, 3584, 11),
        (7168, 8, True, 8, 1024, 4),
    ],
)
def test_rings(width, top_k, totals, warpgroups, elements, slots):
    """The largest piece of a row of which some fit, and how many do."""
    chunks = Chunks(
        team=Team(axes=("x",), size=2), tokens=8, number=1, num_blocks=1, warpgroups=warpgroups
    )
    row = Row.of(width, 2)
    how = dict(row=row, top_k=top_k, chunks=chunks, dtype=BF16, wire_dtype=BF16)
    found = summing.ring_of(**how, slots=32, totals=totals)
    assert (found.piece.parts * row.columns, found.ring) == (elements, slots)


@pytest.mark.parametrize(
    ("devices", "senders", "sending"),
    [(2, 0, 64), (2, 52, 52), (2, 127, 127), (4, 0, 96), (8, 0, 112)],
)
def test_blocks_that_send_and_those_that_add_up(devices, senders, sending):
    """By default a share of all blocks sends to each peer; the rest add up own tokens."""
    team = Team(axes=("x",), size=devices)
    chunks = Chunks(team=team, tokens=8, number=1024, num_blocks=128, warpgroups=2)
    row = Row.of(2048, 2)
    how = dict(row=row, top_k=8, chunks=chunks, dtype=BF16, wire_dtype=BF16)
    theirs, ours = summing.ring_of(**how, slots=32, totals=True).split(senders)
    assert (theirs.chunks.first_block, theirs.chunks.num_blocks) == (0, sending)
    assert (ours.chunks.first_block, ours.chunks.num_blocks) == (sending, 128 - sending)
    assert (theirs.chunks.whose, ours.chunks.whose) == (range(1, devices), range(1))


@pytest.mark.parametrize(
    ("width", "top_k", "warpgroups", "chunk"),
    [(4096, 16, 4, 32), (2048, 8, 2, 128), (8192, 16, 1, 256), (4096, 16, 3, 32)],
)
def test_large_tables_leave_rings_less_memory(width, top_k, warpgroups, chunk):
    """All of it fits into a block's, barriers too."""
    scratch = ring_beside_tables(width, top_k, warpgroups, chunk).scratch()
    memory = [x for x in scratch.values() if hasattr(x, "dtype")]
    assert sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in memory) <= 231_000


def test_tables_that_leave_none_are_refused():
    with pytest.raises(ValueError, match="tables of 256 tokens and top_k=16 for 4 warpgroups"):
        ring_beside_tables(64, 16, warpgroups=4, chunk=256)


def ring_beside_tables(width: int, top_k: int, warpgroups: int, chunk: int) -> summing.Summing:
    row, team = Row.of(width, 2), Team(axes=("x",), size=2)
    assert row is not None
    return summing.ring_of(
        row=row,
        top_k=top_k,
        chunks=Chunks(team=team, tokens=chunk, number=9, num_blocks=1, warpgroups=warpgroups),
        dtype=BF16,
        wire_dtype=F32,
        slots=32,
        totals=False,
    )
