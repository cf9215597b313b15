"""Meshes that skip devices or permute them: kernels refuse them, operations give them to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.errors import BackendUnavailableError

ORDERS = [[1, 2], [0, 2], [1, 0], [2, 0, 1], [4, 5, 6, 7]]
REFUSED = r"the mesh holds its devices in the order \[.*\]; it must be \[0, 1"


def meshes(order):
    """The mesh, made in two ways."""
    devices = [jax.devices()[i] for i in order]
    yield Mesh(np.array(devices), ("x",))
    yield jax.make_mesh((len(order),), ("x",), (AxisType.Auto,), devices=devices)


def mapped(fn, mesh):
    return jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


def rows(order):
    return np.arange(len(order) * 8 * 128, dtype=np.float32).reshape(-1, 128)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("is_jitted", [True, False])
def test_operations_are_right(order, is_jitted):
    x, count = rows(order), len(order)
    for mesh in meshes(order):
        fn = mapped(lambda x: st.all_gather(x, "x"), mesh)
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("x")))
        with st.simulate() as report:
            out = (jax.jit(fn) if is_jitted else fn)(placed)
        np.testing.assert_array_equal(out, np.tile(x, (count, 1)))
        assert report.launches == 0


def test_operations_are_right_in_a_mesh_that_the_program_is_set_in():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[1:3])
    x = rows([1, 2])
    with jax.set_mesh(mesh), st.simulate() as report:
        fn = jax.jit(
            jax.shard_map(
                lambda x: st.all_reduce(x, "x"), in_specs=P("x"), out_specs=P("x"), check_vma=False
            )
        )
        out = fn(jax.device_put(x, P("x")))
    np.testing.assert_array_equal(out, np.tile(x[:8] + x[8:], (2, 1)))
    assert report.launches == 0


def test_gradients_are_right():
    def fn(x):
        return mapped(lambda x: st.all_gather(x, "x"), mesh)(x).sum()

    for mesh in meshes([2, 1]):
        placed = jax.device_put(rows([2, 1]), jax.NamedSharding(mesh, P("x")))
        with st.simulate():
            np.testing.assert_array_equal(jax.jit(jax.grad(fn))(placed), 2)


def test_one_function_on_two_meshes():
    """What was chosen for a mesh must not be taken for another one that has the same axes."""
    gather = jax.jit(lambda x: st.all_gather(x, "x"))
    launches = []
    for order in ([0, 1], [1, 2], [0, 1]):
        mesh = Mesh(np.array(jax.devices())[order], ("x",))
        with st.simulate() as report:
            out = jax.jit(mapped(gather, mesh))(rows(order))
        np.testing.assert_array_equal(out, np.tile(rows(order), (2, 1)))
        launches.append(report.launches)
    assert launches == [1, 0, 1]


def test_the_reason_is_told():
    def fn(x):
        choices.append(st.explain(st.all_gather, x, "x"))
        return x

    choices: list = []
    (mesh, _) = meshes([1, 2])
    with st.simulate():
        jax.jit(mapped(fn, mesh)).lower(rows([1, 2]))
        with pytest.raises(BackendUnavailableError, match=REFUSED):
            jax.jit(mapped(lambda x: st.all_gather(x, "x", backend="pallas"), mesh)).lower(
                rows([1, 2])
            )
    (choice,) = choices
    assert choice.backend == "xla" and "devices in the order [1, 2]" in str(choice)


# --- Kernels that call `plgpu.kernel` themselves --------------------------------------------------


def kernel(body, *scratch):
    def call(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(body, out_type=out, scratch_types=scratch)(x)

    return call


def asks_for_its_place(x_ref, out_ref):
    out_ref[...] = x_ref[...] + lax.axis_index("x").astype(jnp.float32)


def stores_to_a_peer(x_ref, out_ref):
    plgpu.remote_ref(out_ref, jnp.int32(0), device_id_type=pl.DeviceIdType.LOGICAL)[...] = x_ref[
        ...
    ]


def signals_a_peer(x_ref, out_ref, sem):
    pl.semaphore_signal(sem, device_id={"x": 0})
    out_ref[...] = x_ref[...]


def stores_to_all(x_ref, out_ref):
    plgpu.multimem_store(x_ref[...], out_ref, "x")


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("body", "scratch"),
    [
        (asks_for_its_place, ()),
        (stores_to_a_peer, ()),
        (signals_a_peer, (plgpu.SemaphoreType.REGULAR,)),
        (stores_to_all, ()),
    ],
)
def test_orders_that_jax_refuses_on_gpus_are_refused(order, body, scratch):
    for mesh in meshes(order):
        with pytest.raises(NotImplementedError, match=f"kernel {body.__name__}: {REFUSED}"):  # noqa: SIM117
            with st.simulate():
                jax.jit(mapped(kernel(body, *scratch), mesh)).lower(rows(order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_kernel_that_keeps_to_itself_runs_anywhere(order):
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    for mesh in meshes(order):
        placed = jax.device_put(rows(order), jax.NamedSharding(mesh, P("x")))
        with st.simulate() as report:
            np.testing.assert_array_equal(
                jax.jit(mapped(kernel(double), mesh))(placed), 2 * rows(order)
            )
        assert report.launches == 1
