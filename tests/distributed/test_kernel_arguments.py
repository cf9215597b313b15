"""What `kernel.launch` refuses of its arguments, and an array of no semaphores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team

LIKE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
EMPTY = jax.ShapeDtypeStruct((0, 128), jnp.float32)
ONE = dict(sem=SemaphoreArray())


def copy(x, *more, devices=2, body=None, **options):
    """Every device's rows by a kernel with such arguments, in the simulator."""

    def copied(x_ref, *refs, **_):
        refs[len(more)][...] = x_ref[...]

    def run(x):
        how: dict = dict(name="copy", team=Team.along("x"), out_type=[LIKE], num_blocks=1)
        return kernel.launch(body or copied, x, *more, **{**how, **options})[0]

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    with st.simulate(seed=0):
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(symmetric=[EMPTY]), r"symmetric buffer 0 has shape \(0, 128\).* leave it out"),
        (dict(out_type=[LIKE, EMPTY]), r"result 1 has shape \(0, 128\)"),
        (dict(num_threads=0), "num_threads=0 must be at least 1"),
        (dict(scratch=dict(block_done=plgpu.Barrier())), "name block_done is the launch's own"),
        (
            dict(semaphore_arrays=ONE, scratch=dict(sem=plgpu.Barrier())),
            "sem is a name in semaphore_arrays and",
        ),
    ],
)
def test_values(options, message):
    with pytest.raises(ValueError, match=message):
        copy(jnp.ones((16, 128)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(out_type=LIKE), "out_type is of type ShapeDtypeStruct; it must be a list"),
        (dict(num_blocks=1.0), "num_blocks=1.0 is of type float"),
        (dict(name=None), "name=None of a kernel is of type NoneType"),
        (dict(team="x"), r"team='x' is of type str; pass Team.along\(axis_name\)"),
        (dict(semaphore_arrays=[SemaphoreArray()]), "semaphore_arrays is of type list; it must be"),
        (
            dict(body=lambda x_ref, out_ref: None, waiting_warps=1),
            "give the body a parameter",
        ),
        (
            dict(body=lambda x_ref, out_ref, handshake: None),
            "which only a kernel with waiting",
        ),
        (dict(scratch=[plgpu.Barrier()]), "scratch is of type list; it must be a dictionary"),
        (dict(out_type=[None]), "result 0 is of type NoneType; it has no shape"),
        (dict(semaphore_arrays=dict(sem=2)), r"semaphore_arrays\['sem'\] is of type int"),
    ],
)
def test_types(options, message):
    with pytest.raises(TypeError, match=message):
        copy(jnp.ones((16, 128)), **options)


def test_an_operand_without_elements():
    """XLA has no memory for it, and ended the process."""
    with pytest.raises(ValueError, match=r"kernel copy: operand 1 has shape \(0, 128\)"):
        copy(jnp.ones((16, 128)), jnp.ones((0, 128)))


@pytest.mark.compiles
def test_one_device_has_no_semaphore_for_each_peer():
    arrays = dict(received=SemaphoreArray((0,)))
    np.testing.assert_array_equal(copy(jnp.ones((8, 128)), devices=1, semaphore_arrays=arrays), 1)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), 3, [2]])
def test_shapes_of_semaphores(shape):
    with pytest.raises(ValueError, match="the shape must be a tuple of integers, none"):
        SemaphoreArray(shape)


def test_operands_of_numpy_s_have_the_types_of_jax():
    """Of 32 bits, as everywhere in JAX without `jax_enable_x64`."""
    x = np.random.default_rng(0).standard_normal((16, 128), np.float32)
    beside = np.ones((8, 128), np.float64)
    np.testing.assert_array_equal(copy(jnp.asarray(x), beside), x)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="operand 1 is float64"):
        copy(jnp.asarray(x), beside)
