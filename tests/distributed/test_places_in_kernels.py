"""Where a kernel takes its device's place from: its team, however the job counts devices."""

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

import stretto as st
from stretto.distributed import copies, kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import FindingError
from stretto.distributed.team import Team

COLUMNS = 128


def launch(body, *operands, axes="x", **options):
    """Runs `body(team, out_ref, ...)`, whose result is `[1, COLUMNS]` on each device."""
    team = Team.along(axes) if axes else None

    def with_team(*refs, **scratch):
        body(team, *refs, **scratch)

    out = jax.ShapeDtypeStruct((1, COLUMNS), jnp.int32)
    options = dict(name="subject", team=team, out_type=[out], num_blocks=1) | options
    return kernel.launch(with_team, *operands, **options)[0]


def on_mesh(fn, *shape):
    names = ("x", "y")[: len(shape)]
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P(names), check_vma=False))


def store(out_ref, number):
    out_ref[...] = jnp.full((1, COLUMNS), number, jnp.int32)


@pytest.mark.parametrize("from_the_end", [False, True])
@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")])
def test_ids_are_those_outside_and_addresses_reach_them(axes, from_the_end):
    """Each device stores its id at every member of its team, and the sum is taken."""

    def body(team, out_ref, inbox_ref, *, received):
        for offset in range(team.size):
            peer, own = team.neighbour(offset), team.device_id()
            there = copies.remote(inbox_ref, team, peer) if offset else inbox_ref
            there[own] = jnp.full((COLUMNS,), 100 * own + peer, jnp.int32)
            if offset:
                received.signal(peer_id=peer)
        received.wait(team.size - 1)
        store(out_ref, 0)
        for member in range(team.size):
            out_ref[0] = 10 * out_ref[0] + inbox_ref[member]

    def fn():
        size = lax.axis_size(axes)
        inbox = jax.ShapeDtypeStruct((size, COLUMNS), jnp.int32)
        inside = launch(
            body, axes=axes, symmetric=[inbox], semaphore_arrays=dict(received=SemaphoreArray())
        )
        own, want = lax.axis_index(axes), 0
        for member in range(size):
            want = 10 * want + 100 * member + own
        return jnp.stack([inside[0], jnp.full(COLUMNS, want, jnp.int32)])[None]

    with st.simulate(from_the_end=from_the_end) as report:
        inside, outside = np.moveaxis(np.asarray(on_mesh(fn, 2, 3)()), 1, 0)
    np.testing.assert_array_equal(inside, outside)
    assert report.ok, str(report)


def plain(_):
    return lax.axis_index("x")


def of_several_axes(_):
    return lax.axis_index(("x",)) + 0


def in_a_loop(_):
    return lax.fori_loop(0, 2, lambda i, sum: sum + lax.axis_index("x"), 0)


def in_a_branch(team):
    return lax.cond(team.device_id() == 0, lambda: jnp.int32(0), lambda: lax.axis_index("x"))


def in_a_function(_):
    return jax.jit(lambda: lax.axis_index("x"))()


def beside_the_team(team):
    return team.device_id() + lax.axis_index("x")


def in_a_scope(_):
    return pl.run_scoped(lambda _: lax.axis_index("x"), plgpu.Barrier())


WAYS = [
    plain, of_several_axes, in_a_loop, in_a_branch, in_a_function, beside_the_team, in_a_scope,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_place_that_jax_tells_is_refused_with_its_line(way):
    def fn():
        return launch(lambda team, out_ref: store(out_ref, way(team)))

    message = (
        r"kernel subject: lax\.axis_index\('x'\) need not be .* take team\.device_id\(\) .* the"
        r" team's axes \('x',\), .* It is at .*test_places_in_kernels\.py:\d+ .*axis_index\("
    )
    with pytest.raises(ValueError, match=message):
        on_mesh(fn, 2).lower()


@pytest.mark.parametrize("axes", ["x", None], ids=["another team's axis", "no team"])
def test_other_axes_are_refused_too(axes):
    def fn():
        return launch(lambda _, out_ref: store(out_ref, lax.axis_index("y")), axes=axes)

    with pytest.raises(ValueError, match=r"axis_index\('y'\) .* or pass the index as an operand"):
        on_mesh(fn, 2, 2).lower()


def test_blocks_and_warpgroups_have_their_own_axes():
    def body(_, out_ref):
        number = 10 * kernel.block_id() + lax.axis_index(kernel.THREAD_AXIS)
        out_ref[kernel.block_id(), lax.axis_index(kernel.THREAD_AXIS)] = number

    def fn():
        out = jax.ShapeDtypeStruct((2, 2), jnp.int32)
        return launch(body, out_type=[out], num_blocks=2, num_threads=2)

    with st.simulate():
        np.testing.assert_array_equal(on_mesh(fn, 2)(), [[0, 1], [10, 11]] * 2)


def test_a_number_without_its_address_goes_wrong_from_the_end():
    """Pallas' own device ids are not the team's: `team.address` makes the one of the other."""

    def body(team, out_ref, inbox_ref, *, received):
        to = {"x": team.neighbour(1)}
        plgpu.remote_ref(inbox_ref, to)[...] = jnp.full((1, COLUMNS), 7, jnp.int32)
        received.signal(peer_id=team.neighbour(1))
        received.wait()
        out_ref[...] = inbox_ref[...]

    def fn():
        inbox = jax.ShapeDtypeStruct((1, COLUMNS), jnp.int32)
        return launch(body, symmetric=[inbox], semaphore_arrays=dict(received=SemaphoreArray()))

    program = on_mesh(fn, 4)
    with st.simulate():
        assert (np.asarray(program()) == 7).all()
    # Device 0's goes to the third in its place, which the mesh calls device 2.
    with pytest.raises(FindingError, match=r"device 0") as caught, st.simulate(from_the_end=True):
        program()
    assert "devices counted from the end" in str(caught.value.report)
    assert caught.value.report.statistics.link_bytes[0, 2]


@pytest.mark.parametrize("name", ["grid", "cluster", "warpgroup"])
@pytest.mark.parametrize("is_team", [True, False])
def test_axes_of_a_mesh_may_be_named_as_parts_of_a_kernel(name, is_team):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (name, "y"))
    axis = name if is_team else "y"
    whole = P((name, "y"))
    x = jnp.arange(4 * 8 * 128.0).reshape(-1, 128)
    fn = jax.shard_map(
        lambda x: (st.all_reduce(x, axis), lax.psum(x, axis)),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    with st.simulate() as report:
        found, want = jax.jit(fn)(x)
    np.testing.assert_array_equal(found, want)
    assert report.launches > 0
