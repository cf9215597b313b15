"""Barriers in shared memory as the hardware has them: who arrives where, and whose phase it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import DeadlockError, simulate

F32 = jnp.float32
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
SMEM = plgpu.SMEM((8, 128), F32)
CLUSTER = dict(cluster=(2, 2), cluster_names=("c0", "c1"))


def run(body, *operands, out, scratch, seed=0, on_finding="record", **kernel):
    """Runs a kernel on one device; returns (result, report)."""
    struct = jax.ShapeDtypeStruct(out, F32)
    with simulate(seed=seed, on_finding=on_finding) as report:
        result = plgpu.kernel(body, out_type=struct, scratch_types=scratch, **kernel)(*operands)
        return jax.block_until_ready(result), report


# --- Clusters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "flip", "is_ordered"),
    [
        (("c0", "c1"), ("c0",), True),
        (("c0", "c1"), ("c1",), True),
        (("c0", "c1"), ("c0", "c1"), False),  # The other corner: no arrival comes from there.
        ((("c0", "c1"),), ("c0", "c1"), True),  # The two axes as one.
        (("c0",), ("c0",), True),
        (("c0",), ("c1",), False),
    ],
)
def test_a_cluster_barrier_orders_blocks_along_each_axis(axes, flip, is_ordered):
    def body(out_ref, board_ref, met):
        place = {name: lax.axis_index(name) for name in ("c0", "c1")}
        other = [1 - i if name in flip else i for name, i in place.items()]
        mine = tuple(place.values())
        board_ref[mine] = jnp.full((128,), 1 + 2 * place["c0"] + place["c1"], F32)
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        out_ref[mine] = board_ref[tuple(other)]

    structs = [jax.ShapeDtypeStruct((2, 2, 128), F32)] * 2
    scratch = [plgpu.ClusterBarrier(collective_axes=axes)]
    for seed in range(5):
        with simulate(seed=seed, on_finding="record") as report:
            kernel = plgpu.kernel(body, out_type=structs, scratch_types=scratch, **CLUSTER)
            out, _ = jax.block_until_ready(kernel())
        if not is_ordered:
            assert report.kinds() >= {"race"}, str(report)
            continue
        assert report.ok, str(report)
        board = np.array([[1, 2], [3, 4]])
        want = np.flip(board, [("c0", "c1").index(name) for name in flip])
        np.testing.assert_array_equal(out[..., 0], want)


@pytest.mark.parametrize("waiting", [0, 1])
def test_arrivals_at_a_barrier_that_its_leader_tracks(waiting):
    """They reach the first block alone: another one waits for ever."""

    def body(x_ref, out_ref, met):
        plgpu.barrier_arrive(met)

        @pl.when(lax.axis_index("c0") == waiting)
        def _():
            plgpu.barrier_wait(met)
            out_ref[lax.axis_index("c1")] = x_ref[...]

    scratch = [plgpu.ClusterBarrier(collective_axes=("c0",), leader_tracked=True)]
    if waiting:
        with pytest.raises(DeadlockError, match="0 of 2 arrivals"):
            run(body, X, out=(2, 8, 128), scratch=scratch, **CLUSTER)
        return
    out, report = run(body, X, out=(2, 8, 128), scratch=scratch, **CLUSTER)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, [X, X])


# --- Copies that do not happen --------------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, "c0"])
def test_a_copy_with_a_false_predicate_arrives_without_bytes(axes):
    def body(x_ref, out_ref, smem, landed):
        smem[...] = jnp.zeros_like(smem)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed, predicate=False, collective_axes=axes)
        plgpu.barrier_wait(landed)
        out_ref[lax.axis_index("c0"), lax.axis_index("c1")] = smem[...]

    scratch = [SMEM, plgpu.Barrier()]
    out, report = run(body, X, out=(2, 2, 8, 128), scratch=scratch, on_finding="raise", **CLUSTER)
    np.testing.assert_array_equal(out, np.zeros((2, 2, 8, 128)))
    assert report.statistics.copies == 0


def test_one_of_two_copies_to_a_barrier_does_not_happen():
    def body(x_ref, out_ref, smem, landed):
        for half in range(2):
            rows = pl.ds(4 * half, 4)
            copies = lax.axis_index("block") == half
            plgpu.copy_gmem_to_smem(x_ref.at[rows], smem.at[rows], landed, predicate=copies)
        plgpu.barrier_wait(landed)
        rows = pl.ds(4 * lax.axis_index("block"), 4)
        out_ref[rows] = smem[rows]

    scratch = [SMEM, plgpu.Barrier(num_arrivals=2)]
    out, report = run(body, X, out=(8, 128), scratch=scratch, grid=(2,), grid_names=("block",))
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X)


# --- Warps ----------------------------------------------------------------------------------------


def warps(function):
    """Runs `function(warp)` in each warp of the warpgroup."""

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def _():
        function(lax.axis_index("warp"))


def after_a_wait_of(*waiting):
    """The warps `waiting` wait for a first copy, then the warpgroup copies and waits once more."""

    def body(x_ref, out_ref, smem, landed):
        def first(warp):
            @pl.when(warp == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 8)], smem, landed)

            for number in waiting:

                @pl.when(warp == number)
                def _():
                    plgpu.barrier_wait(landed)

        warps(first)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(8, 8)], smem, landed)
        plgpu.barrier_wait(landed)
        out_ref[...] = smem[...]

    return body


def test_all_warps_may_wait_for_themselves():
    x = np.concatenate([X, X + 1])
    for seed in range(5):
        body = after_a_wait_of(0, 1, 2, 3)
        out, report = run(body, x, out=(8, 128), scratch=[SMEM, plgpu.Barrier()], seed=seed)
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, X + 1)


@pytest.mark.parametrize("waiting", [(0,), (0, 1, 2), (3,)])
def test_warps_that_have_waited_unevenly(waiting):
    x = np.concatenate([X, X + 1])
    for seed in range(5):
        body = after_a_wait_of(*waiting)
        _, report = run(body, x, out=(8, 128), scratch=[SMEM, plgpu.Barrier()], seed=seed)
        (finding,) = [f for f in report.findings if f.kind == "uneven waits"]
        counts = ", ".join("1" if w in waiting else "0" for w in range(4))
        assert f"waited {counts} times" in str(finding) and "barrier_wait(landed)" in str(finding)


def test_a_warp_keeps_its_phase_from_one_core_map_to_the_next():
    """Warp 0 alone copies and waits, again and again; the others know nothing of the barrier."""

    def body(x_ref, out_ref, smem, landed):
        for step in range(3):

            def double(warp, step=step):
                @pl.when(warp == 0)
                def _():
                    plgpu.copy_gmem_to_smem(x_ref.at[step], smem, landed)
                    plgpu.barrier_wait(landed)
                    plgpu.copy_smem_to_gmem(smem, out_ref.at[step])
                    plgpu.wait_smem_to_gmem(0)

            warps(double)

    x = np.stack([X, X + 1, X + 2])
    for seed in range(5):
        out, report = run(body, x, out=x.shape, scratch=[SMEM, plgpu.Barrier()], seed=seed)
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("core_maps", [1, 2])
def test_a_warp_that_waits_for_an_earlier_phase_races(core_maps):
    """Warp 1 means the second copy, and is let go by the first, however late it looks."""

    def body(x_ref, out_ref, smem, landed):
        def copy(half):
            plgpu.copy_gmem_to_smem(x_ref.at[half], smem, landed)
            plgpu.barrier_wait(landed)

        def first(warp):
            pl.when(warp == 0)(lambda: copy(0))

        def second(warp):
            pl.when(warp == 0)(lambda: copy(1))

            @pl.when(warp == 1)
            def _():
                plgpu.barrier_wait(landed)
                plgpu.copy_smem_to_gmem(smem, out_ref)

        if core_maps == 2:
            warps(first)
            warps(second)
        else:
            warps(lambda warp: (first(warp), second(warp)))
        plgpu.wait_smem_to_gmem(0)

    x = np.stack([X, X + 1])
    for seed in range(20):
        try:
            _, report = run(body, x, out=(8, 128), scratch=[SMEM, plgpu.Barrier()], seed=seed)
        except DeadlockError:  # It looked after both had landed: its phase never comes.
            continue
        assert report.kinds() == {"race"}, f"seed {seed}: {report}"


@pytest.mark.parametrize("allowed", [0, 1])
def test_each_warp_waits_for_its_own_copies(allowed):
    """Of two warps with one copy each, `wait_smem_to_gmem(1)` waits for neither."""

    def body(x_ref, out_ref, smem, landed):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)

        def send(warp):
            for number in range(2):

                @pl.when(warp == number)
                def _(number=number):
                    rows = pl.ds(4 * number, 4)
                    plgpu.copy_smem_to_gmem(smem.at[rows], out_ref.at[rows])

        warps(send)
        plgpu.wait_smem_to_gmem(allowed)
        smem[pl.ds(0, 4)] = jnp.zeros((4, 128), F32)
        plgpu.wait_smem_to_gmem(0)

    for seed in range(5):
        out, report = run(body, X, out=(8, 128), scratch=[SMEM, plgpu.Barrier()], seed=seed)
        assert report.kinds() == ({"race"} if allowed else set()), str(report)
        if not allowed:
            np.testing.assert_array_equal(out, X)
