"""What is traced for GPUs that are not there, on CPU devices: as on those GPUs, with kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import residency
from stretto.distributed.compiling import Target, compiling_for
from stretto.kernels.problem.machine import HOPPER, Machine

H100 = Target("h100", "NVIDIA H100 80GB HBM3", 132)
B200 = Target("b200", "NVIDIA B200", 148)


def explained(**options):
    found = []

    def body(x):
        found.append(st.explain(st.all_gather, x, "x", **options))
        return x

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((4 * 8, 128), jnp.bfloat16))
    return found[0]


def test_the_machine_is_the_target():
    before = Machine.of_mesh(), residency.num_multiprocessors()
    with compiling_for(H100):
        machine = Machine.of_mesh()
        assert (machine.platform, machine.kind) == ("gpu", H100.kind)
        assert (machine.architecture, machine.multiprocessors) == (HOPPER, 132)
        assert residency.num_multiprocessors() == 132
    with compiling_for(B200):
        assert residency.num_multiprocessors() == 148
    assert (Machine.of_mesh(), residency.num_multiprocessors()) == before


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_kernels_serve_whatever_their_size(backend):
    assert explained().backend == "xla"
    with compiling_for(H100):
        choice = explained(backend=backend)
        assert (choice.backend, choice.interpret) == ("pallas", None)
        assert explained(backend="xla").backend == "xla"


def test_those_that_never_ran_on_such_a_gpu_say_so():
    with compiling_for(B200):
        choice = explained()
    assert choice.backend == "pallas" and "but never run on one" in choice.reason


def test_what_is_simulated_stays_so():
    with compiling_for(H100), st.simulate(core_count=3):
        assert explained().backend == "simulator"
        assert residency.num_multiprocessors() == 3
