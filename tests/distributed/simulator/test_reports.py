"""What reports say: names as the author wrote them, and nothing good of a run that ended early."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed import copies, kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import (
    DeadlockError,
    FindingError,
    KernelFaultError,
    RendezvousError,
    SimulationError,
    StepLimitError,
    UnsupportedKernelError,
    simulate,
)
from stretto.distributed.team import Team

X = np.arange(128, dtype=np.float32)
SEMAPHORE = plgpu.SemaphoreType.REGULAR
SHARED = plgpu.SMEM((128,), jnp.float32)


def call(body, *scratch, **options):
    out = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return jax.jit(plgpu.kernel(body, out_type=out, scratch_types=scratch, **options))


def fine():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    call(body)(X).block_until_ready()


def too_many_arrivals():
    def body(x_ref, out_ref, rows, loaded):
        plgpu.copy_gmem_to_smem(x_ref, rows, loaded)
        plgpu.barrier_arrive(loaded)
        plgpu.barrier_wait(loaded)
        out_ref[...] = rows[...]

    call(body, SHARED, plgpu.Barrier())(X).block_until_ready()


def out_of_bounds():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        out_ref[pl.ds(x_ref[127].astype(jnp.int32), 8)] = x_ref[pl.ds(0, 8)]

    call(body)(X).block_until_ready()


def spin():
    def body(x_ref, out_ref, sem):
        lax.while_loop(lambda n: n >= 0, lambda n: n + 1 + pl.semaphore_read(sem), jnp.int32(0))
        out_ref[...] = x_ref[...]

    call(body, SEMAPHORE)(X).block_until_ready()


def hang():
    def body(x_ref, out_ref, never):
        pl.semaphore_wait(never)
        out_ref[...] = x_ref[...]

    call(body, SEMAPHORE)(X).block_until_ready()


def race():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    call(body, num_threads=2, thread_name="wg")(X).block_until_ready()


def unknown():
    def body(x_ref, out_ref):
        @plgpu.inline_mgpu()
        def device_code(ctx):
            pass

        device_code()

    call(body)(X)


def stay_away():
    def shard(x):
        return lax.cond(lax.axis_index("x") == 1, lambda x: x, call(lambda i, o: None), x)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    fn = jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    jax.jit(fn)(np.tile(X, 2)).block_until_ready()


def own_mistake():
    raise KeyError("the script's own")


def race_inside():
    with simulate():
        race()


FAILURES = [
    (too_many_arrivals, KernelFaultError, "expects 1 arrivals a phase and gets one more"),
    (out_of_bounds, KernelFaultError, "out_ref"),
    (spin, StepLimitError, "max_steps=2000"),
    (hang, DeadlockError, "deadlock in kernel"),
    (race, FindingError, "race on out_ref"),
    (unknown, UnsupportedKernelError, "inline_mgpu"),
    (stay_away, RendezvousError, "device 1 did not come"),
    (own_mistake, KeyError, 'KeyError: "the script\'s own"'),
    (race_inside, FindingError, "FindingError: kernel body"),
]


@pytest.mark.parametrize("before", [None, fine], ids=["at once", "after a launch"])
@pytest.mark.parametrize(
    ("fail", "error", "text"), FAILURES, ids=[case[0].__name__ for case in FAILURES]
)
def test_no_error_leaves_a_report_that_finds_nothing_wrong(fail, error, text, before):
    with pytest.raises(error), simulate(rendezvous_timeout=0.5, max_steps=2000) as report:
        if before is not None:
            before()
        fail()
    assert not report.ok
    assert text in str(report)
    assert "nothing wrong" not in str(report)


def test_a_fault_is_told_beside_findings():
    with pytest.raises(KernelFaultError), simulate(on_finding="record") as report:
        race()
        too_many_arrivals()
    assert "race on out_ref" in str(report) and "gets one more" in str(report)


def test_an_error_that_the_script_has_caught_is_told():
    with pytest.raises(SimulationError), simulate() as report:
        with pytest.raises(jax.errors.JaxRuntimeError):
            too_many_arrivals()
        fine()
    assert not report.ok and "gets one more" in str(report)


def test_what_simulations_inside_have_found_is_counted():
    with simulate() as report:
        for inside in (fine, race):
            with simulate(on_finding="record"):
                inside()
    assert (report.nested_launches, report.nested_failures) == (2, 1)


# --- Names ----------------------------------------------------------------------------------------


def launched(mistake: str):
    """A kernel of `kernel.launch` on two devices, with a mistake."""

    def shard(x):
        team = Team.along("x")

        def body(x_ref, out_ref, inbox_ref, *, from_other, unused, rows, loaded, slots):
            plgpu.copy_gmem_to_smem(x_ref, rows, slots.at[1] if mistake == "slot" else loaded)
            if mistake == "arrival":
                plgpu.barrier_arrive(loaded)
            plgpu.barrier_wait(slots.at[0] if mistake == "slot" else loaded)
            if mistake == "store":
                rows[...] = rows[...] + 1
            other = team.neighbour(1)
            plgpu.copy_smem_to_gmem(rows, copies.remote(inbox_ref, team, other))
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            unused.signal(peer_id=other)
            if mistake != "signal":
                from_other.at[1].signal(peer_id=other)
            if mistake != "wait":
                from_other.at[1].wait()
            out_ref[...] = inbox_ref[...]
            if mistake == "operand":
                x_ref[...] = inbox_ref[...]

        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return kernel.launch(
            body, x, name="launched", team=team, out_type=[out], symmetric=[out], num_blocks=1,
            semaphore_arrays=dict(from_other=SemaphoreArray((2,)), unused=SemaphoreArray()),
            scratch=dict(
                rows=SHARED, loaded=plgpu.Barrier(), slots=plgpu.Barrier(num_barriers=2)
            ),
        )[0]  # fmt: skip

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    fn = jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    jax.jit(fn)(np.tile(X, 2)).block_until_ready()


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("slot", "waits for barrier slots[0]"),
        ("arrival", "barrier loaded expects 1 arrivals"),
        ("store", "race on rows in shared memory of device"),
        ("signal", "waits for semaphore from_other[1] >= 1"),
        ("wait", "race on inbox_ref of device"),
        ("wait", "semaphore from_other[1] of device 0 ends at 1"),
        ("wait", "semaphore unused of device 0 ends at 1"),
        ("operand", "x_ref[...] = inbox_ref[...] changes x_ref of device 0, an operand"),
    ],
)
def test_names_in_a_launched_kernel(mistake, name):
    with pytest.raises(SimulationError), simulate() as report:
        launched(mistake)
    assert name in str(report)
    assert "kwargs" not in str(report) and "sems" not in str(report)


def test_one_scratch_that_is_named_in_a_launched_kernel():
    def body(x_ref, out_ref, *, done, loaded):
        plgpu.barrier_wait(loaded)

    def fn(x):
        return kernel.launch(
            body, x, name="one", team=None, num_blocks=1,
            out_type=[jax.ShapeDtypeStruct((8,), x.dtype)],
            semaphore_arrays=dict(done=SemaphoreArray(local=True)),
            scratch=dict(loaded=plgpu.Barrier()),
        )[0]  # fmt: skip

    with pytest.raises(DeadlockError, match=r"waits for barrier loaded, phase 0"), simulate():
        jax.jit(fn)(X)


def made_in_a_comprehension():
    arrays = {key: pl.get_global(SEMAPHORE) for key in ("first", "second")}
    pl.semaphore_wait(arrays["second"])


def made_two_at_once():
    first, second = pl.get_global(SEMAPHORE), pl.get_global(SEMAPHORE)
    pl.semaphore_signal(first)
    pl.semaphore_wait(second)


def made_one_by_one():
    ready = pl.get_global(SEMAPHORE)
    pl.semaphore_wait(ready)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (made_in_a_comprehension, "global semaphore 1"),  # Not `arrays`, which is both.
        (made_two_at_once, "global semaphore 1"),
        (made_one_by_one, "ready"),
    ],
)
def test_names_of_semaphores_that_a_kernel_makes_itself(make, name):
    def body(x_ref, out_ref):
        make()

    with pytest.raises(DeadlockError, match=f"waits for semaphore {name} >= 1"), simulate():
        call(body)(X)


@pytest.mark.parametrize(
    ("scratch", "name"),
    [
        ([SHARED, plgpu.Barrier()], r"rest\[1\]"),
        ([{"a": SHARED, "b": plgpu.Barrier()}], r"rest\[0\]\['b'\]"),
    ],
)
def test_names_of_scratch_in_a_body_that_takes_any(scratch, name):
    def body(x_ref, out_ref, *rest):
        plgpu.barrier_wait(jax.tree.leaves(list(rest))[-1])

    with pytest.raises(DeadlockError, match=f"waits for barrier {name}, phase 0"), simulate():
        call(body, *scratch)(X)
