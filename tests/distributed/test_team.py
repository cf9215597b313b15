"""Teams: who belongs to one, who its neighbours are, and where there can be none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.devices import axes
from stretto.distributed.team import Team


def mesh_of(*shape, names=("x", "y", "z")):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def on_each(mesh, fun, **options):
    """What `fun()` is on each device, as an array of the mesh's shape."""
    names = mesh.axis_names
    shape = (1,) * len(names)
    program = jax.shard_map(
        lambda: jnp.asarray(fun()).reshape(shape), mesh=mesh, in_specs=(), out_specs=P(*names),
        check_vma=False, **options,
    )  # fmt: skip
    return np.asarray(jax.jit(program)())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_one_axis(size):
    mesh = mesh_of(size)
    teams = []

    def ids():
        teams.append(Team.along("x"))
        return teams[-1].device_id()

    np.testing.assert_array_equal(on_each(mesh, ids), np.arange(size))
    (team,) = teams
    assert team.size == size and team.is_alone == (size == 1)
    assert team.peer_offsets == tuple(range(1, size))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("x", [[0, 0, 0], [1, 1, 1]]),
        ("y", [[0, 1, 2], [0, 1, 2]]),
        (("x", "y"), [[0, 1, 2], [3, 4, 5]]),
        (("y", "x"), [[0, 2, 4], [1, 3, 5]]),
        (["y"], [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_ids_along_some_axes_of_a_mesh(names, expected):
    found = on_each(mesh_of(2, 3), lambda: Team.along(names).device_id())
    np.testing.assert_array_equal(found, expected)


def test_a_tuple_of_axes_of_three():
    sizes = []

    def size():
        sizes.append(Team.along(("x", "z")).size)
        return Team.along(("x", "z")).device_id()

    found = on_each(mesh_of(2, 2, 2), size)
    np.testing.assert_array_equal(found, [[[0, 1], [0, 1]], [[2, 3], [2, 3]]])
    assert sizes == [4]


@pytest.mark.parametrize("offset", [-9, -2, -1, 0, 1, 2, 4, 5, 11])
def test_neighbours_are_on_a_ring(offset):
    found = on_each(mesh_of(5), lambda: Team.along("x").neighbour(offset))
    np.testing.assert_array_equal(found, (np.arange(5) + offset) % 5)


def test_neighbours_of_a_team_of_one_are_itself():
    np.testing.assert_array_equal(on_each(mesh_of(1), lambda: Team.along("x").neighbour(3)), [0])


def test_at_each_offset_every_device_has_another_peer():
    for offset in Team(("x",), 8).peer_offsets:
        peers = on_each(mesh_of(8), lambda: Team.along("x").neighbour(offset))  # noqa: B023
        assert sorted(peers) == list(range(8))
        assert (peers != np.arange(8)).all()


def test_addresses_leave_other_axes_out():
    assert Team(("x",), 4).address(3) == {"x": 3}
    assert Team(("x", "y"), 4).address(3) == {("x", "y"): 3}


def test_teams_are_equal_if_their_axes_are():
    assert Team(("x",), 4) == Team(("x",), 4) and hash(Team(("x",), 4)) == hash(Team(("x",), 4))
    assert Team(("x",), 4) != Team(("y",), 4)


class TestErrors:
    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ("w", r"axis 'w' is not among the enclosing shard_map's axes \('x', 'y'\); use one"),
            (("x", "w"), r"axis 'w' is not among"),
            ((), r"axis_name is empty; name at least one"),
            (("x", "x"), r"axis_name=\('x', 'x'\) names an axis twice"),
        ],
    )
    def test_axes(self, names, message):
        with pytest.raises(ValueError, match=message):
            on_each(mesh_of(2, 2), lambda: Team.along(names).device_id())

    def test_outside_of_shard_map(self):
        with pytest.raises(ValueError, match=r"axis 'x' is not bound: call this inside jax\.shard"):
            Team.along("x")
        with pytest.raises(ValueError, match="is not bound"):
            jax.jit(lambda: axes.axis_size("x"))()

    def test_an_axis_that_is_left_to_the_compiler(self):
        """A kernel's devices must all be told what to do; XLA's collectives need not (B25)."""
        mesh = mesh_of(2, 2)
        program = jax.shard_map(
            lambda x: x + Team.along("x").device_id(),
            mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False,
        )  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"\('y',\) are not; leave axis_names out"):
            jax.jit(program)(jnp.zeros(2))


class TestTypes:
    """Under `check_vma=True` values carry the axes that they vary over."""

    def types(self, fun):
        found = []

        def call(x):
            found.append(fun(x))
            return x

        program = jax.shard_map(call, mesh=mesh_of(2, 2), in_specs=P("x"), out_specs=P("x"))
        jax.jit(program)(jnp.zeros(2))
        return found[0]

    def test_what_varies(self):
        assert self.types(axes.varying_axes) == {"x"}
        assert self.types(lambda x: axes.varying_axes(jnp.zeros(3))) == frozenset()
        assert self.types(lambda x: axes.varying_axes(lax.axis_index("y") + x)) == {"x", "y"}

    def test_made_to_vary(self):
        both = self.types(lambda x: axes.varying_axes(axes.make_varying(x, ("y", "x"))))
        assert both == {"x", "y"}
        assert self.types(lambda x: axes.make_varying(x, ("x",)) is x)
