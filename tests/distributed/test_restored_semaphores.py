"""Semaphores that a kernel leaves at zero, which lie in the heap."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import kernel, semaphores
from stretto.distributed.memory import heap
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import SimulationError
from stretto.distributed.team import Team

pytestmark = pytest.mark.usefixtures("traces_apart")


def handed_on(x, *, restored=True, decrement=True):
    """Each device tells the next one, twice in a row."""
    team = Team.along("x")

    def body(x, out, told):
        @pl.when(kernel.block_id() == 0)
        def _():
            told.at[1].signal(inc=2, peer_id=team.neighbour(1))
            told.at[1].wait(2, decrement=decrement)
            out[...] = x[...]

    arrays = dict(told=SemaphoreArray((2,), restored=restored))
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    options = dict(name="handed_on", team=team, out_type=out_type, num_blocks=2)
    for _ in range(2):
        (x,) = kernel.launch(body, x, **options, semaphore_arrays=arrays)
    return x


def program(**options):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def fun(x):
        return handed_on(x, **options)

    spec = dict(in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(jax.shard_map(fun, mesh=mesh, **spec))


@pytest.mark.parametrize("cores", [2, 4])
def test_launches_in_a_row(cores):
    """They start by XLA's barrier, and by counters."""
    x = np.arange(256, dtype=np.float32)
    for seed in range(5):
        with st.simulate(seed=seed, core_count=cores) as report:
            np.testing.assert_array_equal(program()(x), x)
        assert report.ok and report.launches == 2, str(report)


def test_what_is_not_restored_is_found():
    with pytest.raises(SimulationError), st.simulate(core_count=4):
        jax.block_until_ready(program(decrement=False)(np.zeros(256, np.float32)))


def one_launch(use, *, num_threads=1, waiting_warps=0, restored=True):
    """The report of a kernel of two devices that does `use(team, told, handshake)`."""

    def call(x):
        team = Team.along("x")

        def body(x, out, told, handshake=None):
            use(team, told, handshake)

        out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        arrays = dict(told=SemaphoreArray((2,), restored=restored))
        options = dict(num_blocks=1, num_threads=num_threads, waiting_warps=waiting_warps)
        return kernel.launch(
            body,
            x,
            name="one_launch",
            team=team,
            out_type=out_type,
            semaphore_arrays=arrays,
            **options,
        )[0]

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = dict(in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with st.simulate(core_count=4) as report:
        mapped = jax.shard_map(call, mesh=mesh, **spec)
        jax.block_until_ready(jax.jit(mapped)(np.zeros(256, np.float32)))
    return report


def test_two_that_take_at_once_are_found():
    """Neither looks again before it subtracts."""

    def at_once(team, told, _):
        told.at[0].signal()
        told.at[0].wait(decrement=True)

    def in_turn(team, told, _):
        @pl.when(lax.axis_index(kernel.THREAD_AXIS) == 0)
        def _():
            told.at[0].signal(inc=2)
            told.at[0].wait(decrement=True)
            told.at[0].wait(decrement=True)

    with pytest.raises(SimulationError, match="Both may see the same count"):
        one_launch(at_once, num_threads=2)
    assert one_launch(in_turn, num_threads=2).ok


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_before_the_peers_start_is_found(waits):
    """It may lie in the memory of the launch before."""

    def use(team, told, handshake):
        handshake.arrive()
        if waits:
            handshake.wait()
        told.at[0].signal(peer_id=team.neighbour(1))
        if not waits:
            handshake.wait()
        told.at[0].wait(decrement=True)
        handshake.wait_at_end()

    if waits:
        assert one_launch(use, waiting_warps=1).ok
    else:
        with pytest.raises(SimulationError, match="before start"):
            one_launch(use, waiting_warps=1)


def test_zeros_in_all_of_an_array():
    def use(team, told, _):
        for number in range(2):
            told.at[number].signal(inc=3, peer_id=team.neighbour(1))
        for number in range(2):
            told.at[number].wait(3)
        told.zero()

    assert one_launch(use).ok


def test_zeros_before_a_signal_are_found():
    def use(team, told, _):
        told.at[0].signal(peer_id=team.neighbour(1))
        told.zero()

    with pytest.raises(SimulationError, match="race on semaphore told"):
        one_launch(use)


def test_zeros_are_for_arrays_that_are_restored():
    with pytest.raises(ValueError, match=r"told: zero\(\) is for an array as a whole"):
        one_launch(lambda team, told, _: told.zero(), restored=False)
    with pytest.raises(ValueError, match=r"told: zero\(\) is for an array as a whole"):
        one_launch(lambda team, told, _: told.at[1].zero())


def test_words():
    """One array after another, up to the end of the slot; XLA zeroes the others."""
    most = heap.WORDS - heap.COUNTERS
    assert most > 2**14
    given = dict(
        first=SemaphoreArray((3,), restored=True),
        usual=SemaphoreArray((3,)),
        second=SemaphoreArray((most - 3,), restored=True),
        third=SemaphoreArray(restored=True),
    )
    words = {name: array.heap_word for name, array in semaphores.in_heap(given).items()}
    assert words == dict(first=heap.COUNTERS, usual=None, second=heap.COUNTERS + 3, third=None)


def test_they_are_not_messages():
    """Nor a part of what `posting` has for them."""
    last = heap.MAX_SENDERS * heap.CHANNELS * 2 * heap.HALF_WORDS
    assert heap.MAIL + last <= heap.COUNTERS


def test_without_a_heap(monkeypatch):
    monkeypatch.setenv("STRETTO_HEAP", "0")
    x = np.arange(256, dtype=np.float32)
    with st.simulate(core_count=4) as report:
        np.testing.assert_array_equal(program()(x), x)
    assert report.ok, str(report)
