"""How devices come to launches: nobody waits for a peer in a thread that the peer may need."""

from __future__ import annotations

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.simulator.rendezvous import Activity, Rendezvous


@dataclasses.dataclass(eq=False)
class Visit:
    """Of a device that brings one number."""

    position: int
    number: int
    site: int = 1
    run: int = 1
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    results: list = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def operands(self) -> list:
        return [self.number]

    def leave(self, results: list) -> None:
        self.results = results
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self.error = str(error)
        self.ended.set()


def rendezvous(launch, *, devices: int = 2, timeout: float = 60.0, activity=None) -> Rendezvous:
    return Rendezvous(
        "kernel", devices, lambda d: f"device {d}", launch, lambda _: None,
        timeout=timeout, activity=activity or Activity(),
    )  # fmt: skip


def come(place: Rendezvous, *visits: Visit) -> None:
    for visit in visits:
        place.come(visit.position, visit)


def results_of(*visits: Visit) -> list:
    assert all(visit.ended.wait(20) for visit in visits)
    return [visit.results for visit in visits]


def total(number: int, operands: list) -> list:
    """Every device gets the number of the launch, and the sum of what all brought."""
    return [[number, sum(values[0] for values in operands)]] * len(operands)


def test_coming_does_not_wait_and_the_last_one_starts_the_launch():
    place = rendezvous(total)
    first, last = Visit(0, 10), Visit(1, 1)
    come(place, first)
    assert not first.ended.is_set()
    come(place, last)
    assert results_of(first, last) == [[0, 11], [0, 11]]


def test_devices_may_come_to_two_places_in_other_orders():
    """Two copies of a function are two places, and nothing says which of them comes first."""
    place = rendezvous(total)
    here = [Visit(0, 10, site=1), Visit(0, 20, site=2)]
    there = [Visit(1, 2, site=2), Visit(1, 1, site=1)]
    come(place, *here, *there)
    assert results_of(*here) == [[0, 11], [0, 22]]


def test_runs_are_kept_apart_and_counted():
    place = rendezvous(total)
    visits = [Visit(d, 10**r, run=r) for r in (5, 6) for d in (0, 1)]
    come(place, visits[0], visits[2], visits[3], visits[1])
    assert results_of(*visits) == [[0, 2 * 10**5]] * 2 + [[1, 2 * 10**6]] * 2


def test_an_error_of_the_launch_ends_every_visit():
    def fail(number, operands):
        raise ValueError("no such kernel")

    place = rendezvous(fail)
    visits = Visit(0, 1), Visit(1, 1)
    come(place, *visits)
    results_of(*visits)
    assert [visit.error for visit in visits] == ["no such kernel"] * 2


def test_who_is_missing_is_named_and_too_late_afterwards():
    place = rendezvous(total, devices=3, timeout=0.1)
    visits = Visit(0, 1), Visit(2, 1)
    come(place, *visits)
    results_of(*visits)
    assert all("device 1 did not come to it within 0.1 s" in visit.error for visit in visits)
    late = Visit(1, 1)
    come(place, late)
    assert late.error == visits[0].error


def test_time_in_which_a_launch_runs_does_not_count():
    activity = Activity()
    place = rendezvous(total, timeout=0.3, activity=activity)
    activity.note(started=1)
    first, last = Visit(0, 1), Visit(1, 1)
    come(place, first)
    assert not first.ended.wait(1.0)
    activity.note(started=-1)
    come(place, last)
    assert results_of(first, last) == [[0, 2]] * 2


# --- In programs ----------------------------------------------------------------------------------


def on_devices(fn, count: int):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def shift(x):
    """The shard of the device before."""

    def body(x_ref, out_ref, received_sem):
        to = {"x": lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))}
        plgpu.remote_ref(out_ref, to)[...] = x_ref[...] + 0
        pl.semaphore_signal(received_sem, device_id=to)
        pl.semaphore_wait(received_sem)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SemaphoreType.REGULAR])(x)


@pytest.mark.parametrize("count", [slow(2), slow(4), 8])
def test_many_launches_that_nobody_waits_for(count):
    """XLA lets 32 programs wait on a device, and starting one more held the threads of all."""
    step = on_devices(lambda x: shift(x) + 1, count)
    x = np.arange(count * 128, dtype=np.float32)
    with st.simulate(detect_races=False, rendezvous_timeout=10) as report:
        y = x
        for _ in range(100):
            y = step(y)
    np.testing.assert_array_equal(y, np.roll(x, 100 * 128) + 100)
    assert report.launches == 100


@pytest.mark.parametrize("count", [2, slow(4), slow(8)])
def test_hundreds_of_launches_in_a_loop_of_the_program(count):
    fn = on_devices(lambda x: lax.fori_loop(0, 200, lambda _, y: shift(y) + 1, x), count)
    x = np.arange(count * 128, dtype=np.float32)
    with st.simulate(detect_races=False, rendezvous_timeout=10) as report:
        np.testing.assert_array_equal(fn(x), np.roll(x, 200 * 128) + 200)
    assert report.launches == 200


def test_programs_without_kernels_between_those_with_some():
    step, other = on_devices(shift, 8), on_devices(lambda x: x + 1, 8)
    x = np.arange(8 * 128, dtype=np.float32)
    with st.simulate(detect_races=False, rendezvous_timeout=10):
        y = x
        for _ in range(4):
            y = step(y)
            for _ in range(40):
                y = other(y)
    np.testing.assert_array_equal(y, np.roll(x, 4 * 128) + 160)


# Products on XLA's other threads: the devices come to what follows each in any order.
BRANCHES = {
    "a function that is called several times": jax.jit(shift),
    "kernels of one program": shift,
    "loops": lambda x: lax.fori_loop(0, 3, lambda _, y: shift(y), x),
    "collectives": lambda x: lax.ppermute(
        shift(x), "x", [(d, (d + 1) % lax.axis_size("x")) for d in range(lax.axis_size("x"))]
    ),
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_branches_that_devices_come_to_in_any_order(branch):
    times = {"loops": 3, "collectives": 2}.get(branch, 1)
    sizes = np.arange(1, 9, dtype=np.float32)

    def fn(x, unit):
        products = [functools.reduce(lax.dot, [unit] * (k % 3 + 1), x) for k in range(8)]
        return jnp.stack(
            [size * BRANCHES[branch](y) for size, y in zip(sizes, products, strict=True)]
        )

    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    fn = jax.jit(
        jax.shard_map(
            fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(None, "x"), check_vma=False
        )
    )
    x = np.arange(8 * 256, dtype=np.float32)[:, None] * np.ones(256, np.float32)
    want = sizes[:, None, None] * np.roll(x, times * 256, axis=0)
    for seed in range(3):
        with st.simulate(seed=seed, detect_races=False, rendezvous_timeout=10):
            np.testing.assert_array_equal(fn(x, np.eye(256, dtype=np.float32)), want)


@pytest.mark.parametrize("count", [2, slow(4), slow(8)])
def test_several_operations_with_gradients(count):
    """A training loop, whose steps nobody waits for."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))

    def loss(w, x):
        hidden = st.all_gather_matmul(x, w, "x")
        return (st.all_reduce(hidden.astype(jnp.float32), "x") ** 2).mean()

    def step(x, w):
        return w - jax.grad(loss)(w, x).astype(w.dtype)

    specs = (P("x", None), P(None, "x"))
    fn = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    x = jax.random.normal(jax.random.key(0), (8 * count, 64), jnp.bfloat16) / 8
    w = jax.random.normal(jax.random.key(1), (64, 8 * count), jnp.bfloat16) / 8

    def train() -> np.ndarray:
        got, jitted = w, jax.jit(fn)
        for _ in range(2):
            got = jitted(x, got)
        return np.asarray(got, np.float32)

    with st.simulate(detect_races=False, core_count=1, rendezvous_timeout=10) as report:
        got = train()
    assert report.launches >= 2 * 3
    np.testing.assert_allclose(got, train(), atol=2e-2)  # Outside, it is XLA that serves.
