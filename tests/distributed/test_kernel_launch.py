"""The entry point of kernels, semaphores, and transformations of a launch, in the simulator."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import copies, kernel, posting, residency
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import DeadlockError, FindingError, simulate
from stretto.distributed.team import Team
from stretto.distributed.tools import aot, profiling

ROWS, COLUMNS = 8, 128


def mesh_of(order):
    devices = np.array(jax.devices())[list(order)]
    return Mesh(devices, ("x",), axis_types=(AxisType.Auto,))


def rotate(x, *, num_blocks=1, wait=True, **options):
    """Every device puts its rows into a buffer of its successor, which returns what it got."""
    team = Team.along("x")

    def body(x_ref, out_ref, inbox_ref, *, received, smem, arrived, handshake=None):
        if handshake is not None:  # It closes in its own way, which is not at all.
            handshake.arrive_and_wait()
        plgpu.copy_gmem_to_smem(x_ref, smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(smem, copies.remote(inbox_ref, team, team.neighbour(1)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        received.signal(peer_id=team.neighbour(1))
        if wait:
            received.wait()
        plgpu.copy_gmem_to_smem(inbox_ref, smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(smem, out_ref)

    (out,) = kernel.launch(
        body,
        x,
        name="rotate",
        team=team,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        symmetric=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        num_blocks=num_blocks,
        semaphore_arrays=dict(received=SemaphoreArray()),
        scratch=dict(smem=plgpu.SMEM((ROWS, COLUMNS), x.dtype), arrived=plgpu.Barrier()),
        **options,
    )
    return out


def rows(devices, seed=0):
    x = np.random.default_rng(seed).integers(-9, 9, (devices * ROWS, COLUMNS))
    return x.astype(np.float32)


def rolled(x):
    return np.roll(x, ROWS, axis=0)


def sharded(fun, devices=3, check_vma=False):
    return jax.shard_map(
        fun, mesh=mesh_of(range(devices)), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )


@pytest.fixture
def simulation():
    with st.simulate(seed=5, core_count=4) as report:
        yield report
    assert report.ok, str(report)


class TestLaunch:
    def test_symmetric_buffers_are_written_by_peers_and_not_returned(self, simulation):
        x = rows(3)
        np.testing.assert_array_equal(jax.jit(sharded(rotate))(x), rolled(x))

    def test_stores_of_a_team_of_one_device_are_complete(self, simulation):
        """The launch waits for them, as it does for those of several devices."""
        x = rows(1)
        np.testing.assert_array_equal(jax.jit(sharded(rotate, 1))(x), x)

    def test_outputs_keep_their_varying_type(self, simulation):
        x = rows(2)
        out = jax.jit(sharded(rotate, 2, check_vma=True))(x)
        np.testing.assert_array_equal(out, rolled(x))

    def test_many_launches_in_one_program(self, simulation):
        x = rows(2)
        program = sharded(lambda x: lax.fori_loop(0, 5, lambda _, y: rotate(y), x), 2)
        np.testing.assert_array_equal(jax.jit(program)(x), rolled(x))
        assert simulation.launches == 5

    def test_a_device_is_held_until_its_peers_are_done(self):
        """Or it could end, and its buffers be reused, while a peer still writes."""
        x = rows(3)
        found = set()
        for seed in range(6):
            with st.simulate(seed=seed, schedule="pct", on_finding="record") as report:
                program = sharded(lambda x: rotate(x, wait=False, waiting_warps=1))
                jax.block_until_ready(jax.jit(program)(x))
            found |= report.kinds()
        assert "after end" in found
        with st.simulate(on_finding="record") as report:
            jax.block_until_ready(jax.jit(sharded(lambda x: rotate(x, wait=False)))(x))
        assert "after end" not in report.kinds() and not report.ok  # The race is still there.
        assert "race on inbox_ref of device" in str(report)  # By its name in the body.

    def test_a_kernel_without_a_team(self, simulation):
        def double(x):
            def body(x_ref, out_ref):
                out_ref[...] = x_ref[...] * 2

            return kernel.launch(
                body, x, name="double", team=None, num_blocks=1,
                out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            )[0]  # fmt: skip

        x = rows(1)
        np.testing.assert_array_equal(jax.jit(double)(x), 2 * x)

    def test_who_would_meet_needs_a_team(self):
        with pytest.raises(
            ValueError, match="waiting_warps=1 must not be negative, and needs a team"
        ):
            kernel.launch(
                lambda *refs: None, rows(1), name="alone", team=None, num_blocks=1,
                waiting_warps=1, out_type=[],
            )  # fmt: skip

    def test_a_body_that_takes_a_traced_value_from_outside(self, simulation):
        def call(x):
            twice = x[0, 0] * 2

            def body(x_ref, out_ref):
                out_ref[...] = x_ref[...] + twice

            return kernel.launch(
                body, x, name="outside", team=None, num_blocks=1,
                out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            )[0]  # fmt: skip

        with pytest.raises(ValueError, match=r"kernel outside: its body uses a traced value from"):
            jax.jit(call)(rows(1))

    @pytest.mark.parametrize(
        ("num_blocks", "message"),
        [
            (0, r"kernel rotate: num_blocks=0 must be between 1 and 4, the number of multip"),
            (5, r"kernel rotate: num_blocks=5 must be between 1 and 4"),
        ],
    )
    def test_blocks_that_cannot_all_be_resident(self, num_blocks, message, simulation):
        program = sharded(lambda x: rotate(x, num_blocks=num_blocks))
        with pytest.raises(ValueError, match=message):
            jax.jit(program)(rows(3))

    def test_room_is_left_for_what_runs_beside_kernels(self, monkeypatch):
        monkeypatch.delenv("STRETTO_FREE_MULTIPROCESSORS", raising=False)
        with st.simulate(core_count=32):
            assert residency.num_multiprocessors() == 32
            with residency.beside_collectives():
                assert residency.num_multiprocessors() == 30
                monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", "7")
                assert residency.num_multiprocessors() == 25
            assert residency.num_multiprocessors() == 25
            monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", "32")
            assert residency.num_multiprocessors() == 1

    @pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]])
    def test_a_permuted_mesh_is_refused_before_anything_runs(self, order, simulation):
        program = jax.shard_map(
            rotate, mesh=mesh_of(order), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        ids = re.escape(str(order))
        with pytest.raises(NotImplementedError, match=rf"kernel rotate: .* in the order {ids}; it"):
            jax.jit(program).lower(rows(4))


class TestTransformations:
    def test_vmap_launches_once_an_entry(self, simulation):
        x = np.stack([rows(2, seed) for seed in range(3)])
        mapped = jax.shard_map(
            jax.vmap(rotate), mesh=mesh_of(range(2)), in_specs=P(None, "x"),
            out_specs=P(None, "x"), check_vma=False,
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(mapped)(x), np.stack([rolled(one) for one in x]))
        assert simulation.launches == 3

    def test_vmap_along_another_axis_of_the_array(self, simulation):
        x = np.stack([rows(2, seed) for seed in range(2)], axis=1)
        mapped = jax.vmap(sharded(rotate, 2), in_axes=1, out_axes=2)
        want = np.stack([rolled(x[:, i]) for i in range(2)], axis=2)
        np.testing.assert_array_equal(jax.jit(mapped)(x), want)

    @pytest.mark.parametrize("mode", ["reverse", "forward"])
    def test_derivatives_of_a_bare_kernel_are_refused(self, mode, simulation):
        program, x = sharded(rotate, 2), rows(2)
        with pytest.raises(
            NotImplementedError, match=r"kernel rotate cannot be differentiated by itself; wrap"
        ):
            if mode == "reverse":
                jax.grad(lambda x: program(x).sum())(x)
            else:
                jax.jvp(program, (x,), (x,))


def tell(method, *, devices=2, spec=None, team=True, **arguments):
    """Runs a kernel that calls `method` of a semaphore array, on each of `devices`."""

    def body(x_ref, out_ref, *, sem):
        method(sem, **arguments)
        out_ref[...] = x_ref[...]

    def call(x):
        return kernel.launch(
            body, x, name="tell", team=Team.along("x") if team else None, num_blocks=1,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            semaphore_arrays=dict(sem=spec or SemaphoreArray()),
        )[0]  # fmt: skip

    x = rows(devices)
    with st.simulate(seed=1):
        return jax.block_until_ready(jax.jit(sharded(call, devices))(x))


class TestSemaphores:
    def test_an_element_of_an_array(self):
        def use(sem):
            sem.at[1, 2].signal(inc=3)
            sem.at[1].at[2].wait(3, decrement=True)

        tell(use, spec=SemaphoreArray((2, 3)))

    def test_size(self):
        assert SemaphoreArray().size == 1 and SemaphoreArray((2, 3)).size == 6

    def test_each_element_is_its_own(self):
        def use(sem):
            sem.at[0].signal()
            sem.at[1].wait()

        with pytest.raises(DeadlockError, match=r"sem\[1\] >= 1"):
            tell(use, spec=SemaphoreArray((2,)))

    def test_a_wait_leaves_the_count_or_takes_it_off(self):
        def keep(sem):
            sem.signal(inc=2)
            sem.wait(2)
            sem.wait(2)

        def take(sem):
            sem.signal(inc=2)
            sem.wait(2, decrement=True)
            sem.wait(2)

        tell(keep)
        with pytest.raises(DeadlockError):
            tell(take)

    def test_signals_of_peers_count_on_the_peer(self):
        def use(sem):
            team = Team.along("x")
            sem.signal(peer_id=team.neighbour(1))
            sem.wait()

        tell(use, devices=3)

    @pytest.mark.parametrize(
        ("spec", "use", "message"),
        [
            (SemaphoreArray((2, 3)), lambda s: s.wait(), r"shape \(2, 3\); name one element"),
            (SemaphoreArray((2, 3)), lambda s: s.at[1].signal(), r"shape \(2, 3\); name one"),
            (SemaphoreArray(), lambda s: s.at[1].signal(), r"semaphore sem .* shape \(\)"),
            (
                SemaphoreArray(local=True),
                lambda s: s.signal(peer_id=0),
                r"semaphore sem is local and cannot be signalled on a peer",
            ),
        ],
    )
    def test_errors(self, spec, use, message):
        with pytest.raises(ValueError, match=message):
            tell(use, spec=spec)

    def test_what_could_be_a_peer_or_a_count_has_to_be_named(self):
        said = r"Semaphore.signal: 1 must be passed by name, as one of inc=\.\.\., peer_id=\.\.\."
        with pytest.raises(TypeError, match=said):
            tell(lambda sem: sem.signal(1), devices=2)
        with pytest.raises(TypeError, match="1, 0 must be passed by name"):
            tell(lambda sem: sem.signal(1, 0), devices=2)
        with pytest.raises(TypeError, match=r"Semaphore.wait: True .* decrement="):
            tell(lambda sem: sem.wait(1, True), devices=2)

    @pytest.mark.parametrize(
        ("call", "first"),
        [
            (lambda: SemaphoreArray((2,), True), "SemaphoreArray: True .* local="),
            (lambda: copies.Pull(3), "Pull: 3 .* pieces="),
            (lambda: copies.Push([]), r"Push: \[\] .* sources="),
            (lambda: residency.leaves_room(3, True), "leaves_room: True .* all_wait="),
            (lambda: residency.most_blocks_beside_others(True), "True .* all_wait="),
            (lambda: posting.room(True), "room: True .* bare="),
            (lambda: posting.obstacle(2, 4, True), "obstacle: True .* bare="),
            (lambda: posting.words_of(4, "float32", True), "words_of: True .* bare="),
            (lambda: simulate(3), "simulate: 3 .* seed="),
            (lambda: aot.mesh_of_gpus((2,), "x", "h100"), "mesh_of_gpus: 'h100' .* target="),
            (lambda: profiling.profiled(None, 3), "profiled: 3 .* events="),
        ],
    )
    def test_others_that_have_to_be_named(self, call, first):
        with pytest.raises(TypeError, match=first):
            call()

    def test_a_kernel_without_a_team_has_no_peers(self):
        with pytest.raises(ValueError, match="cannot be signalled on a peer"):
            tell(lambda s: s.signal(peer_id=0), team=False)


def push(x, count, num_blocks=2):
    """`copies.Push` of two sources: to the successor, and to it and oneself."""
    team = Team.along("x")
    piece, columns = 4, COLUMNS

    def body(x_ref, y_ref, out_ref, *, buffers, arrived):
        there = copies.remote(out_ref, team, team.neighbour(1))
        copies.Push(
            sources=[x_ref, y_ref],
            destinations=[[there.at[0]], [there.at[1], out_ref.at[2]]],
            buffers=buffers,
            barriers=arrived,
            num_blocks=num_blocks,
        ).run(kernel.block_id())

    return kernel.launch(
        body, x, -x, name="push", team=team, num_blocks=num_blocks,
        out_type=[jax.ShapeDtypeStruct((3, *x.shape), x.dtype)],
        scratch=dict(
            buffers=plgpu.SMEM((count, piece, columns), x.dtype),
            arrived=plgpu.Barrier(num_barriers=count),
        ),
    )[0]  # fmt: skip


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("height", [4, 12, 32])
def test_push(slots, height, simulation):
    """Any number of pieces, also fewer than slots."""
    x = np.arange(2 * height * COLUMNS, dtype=np.float32).reshape(2 * height, COLUMNS) + 1
    program = jax.shard_map(
        lambda x: push(x, slots), mesh=mesh_of(range(2)), in_specs=P("x"),
        out_specs=P(None, "x"), check_vma=False,
    )  # fmt: skip
    other = np.roll(x, height, axis=0)
    np.testing.assert_array_equal(jax.jit(program)(x), np.stack([other, -other, -x]))


def test_push_of_a_last_piece_that_is_not_full(simulation):
    """To an array of its own it is cut off; to a part of one it is refused (`test_windows`)."""

    def push_all(x):
        team = Team.along("x")

        def body(x_ref, out_ref, *, buffers, arrived):
            there = copies.remote(out_ref, team, team.neighbour(1))
            copies.Push(
                sources=[x_ref], destinations=[[there]], buffers=buffers, barriers=arrived,
                num_blocks=1,
            ).run(kernel.block_id())  # fmt: skip

        return kernel.launch(
            body, x, name="push_all", team=team, num_blocks=1,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            scratch=dict(
                buffers=plgpu.SMEM((2, 4, COLUMNS), x.dtype),
                arrived=plgpu.Barrier(num_barriers=2),
            ),
        )[0]  # fmt: skip

    x = np.arange(2 * 10 * COLUMNS, dtype=np.float32).reshape(2 * 10, COLUMNS)
    np.testing.assert_array_equal(jax.jit(sharded(push_all, 2))(x), np.roll(x, 10, axis=0))


def test_a_signal_before_a_store_is_in_place_is_found(monkeypatch):
    """The layer's rule: a bulk store is waited for to its end before it is signalled."""
    original = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, **_: original(n, wait_read_only=True))
    with pytest.raises(FindingError), st.simulate(seed=0):
        jax.block_until_ready(jax.jit(sharded(rotate))(rows(3)))


def test_independent_kernels_of_a_program_come_in_one_order(simulation) -> None:
    """As on a GPU, so that a seed's run can be had again."""

    def both(x: jax.Array) -> jax.Array:
        return rotate(x) + rotate(2 * x)

    lowered = jax.jit(sharded(both)).lower(rows(3)).as_text()
    calls = re.findall(r"@stretto_kernel_call\((.*?)\)", lowered)
    first, second = (call.split(", ") for call in calls)
    assert len(second) == len(first) + 1  # it takes a number from the first one's result


def pull_reversed(x, *, swap=True):
    """Every device fetches its successor's rows, the last piece first; or in their order."""
    team, piece, pieces = Team.along("x"), 8, 4
    shape = (pieces * piece, COLUMNS)

    def body(x_ref, out_ref, *, buffers, arrived):
        def place(i):
            to = ((pieces - 1 - i) * piece, 0)
            return copies.Place(0, i * piece, 0, to=to if swap else None)

        copies.Pull(
            pieces=pieces,
            place=place,
            sources=[copies.remote(x_ref, team, team.neighbour(1))],
            destination=lambda _: out_ref,
            buffers=buffers,
            barriers=arrived,
        ).run()

    (out,) = kernel.launch(
        body,
        x,
        name="pull_reversed",
        team=team,
        out_type=[jax.ShapeDtypeStruct(shape, x.dtype)],
        num_blocks=1,
        scratch=dict(
            buffers=plgpu.SMEM((2, piece, COLUMNS), x.dtype),
            arrived=plgpu.Barrier(num_barriers=2),
        ),
    )
    return out


@pytest.mark.parametrize("swap", [True, False])
def test_a_piece_may_go_elsewhere_than_where_it_lies(simulation, swap):
    x = rows(3 * 4)
    out = jax.jit(sharded(lambda x: pull_reversed(x, swap=swap)))(x)
    pieces = np.roll(x, -4 * ROWS, axis=0).reshape(3, 4, ROWS, COLUMNS)
    expected = pieces[:, ::-1] if swap else pieces
    np.testing.assert_array_equal(np.asarray(out), expected.reshape(x.shape))
