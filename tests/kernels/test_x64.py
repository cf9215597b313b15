"""With `jax_enable_x64`, where Python's numbers are of 64 bits: kernels are the same as without."""

from __future__ import annotations

import functools
import re

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_checks import drawn, per_device, same_bits
from fused_cases import BF16, F32
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import copies, kernel, settings
from stretto.distributed.memory import edges
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team

MOVES = ("all_gather", "all_to_all")
COLLECTIVES = (*MOVES, "reduce_scatter", "all_reduce")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def simulation():
    with st.simulate(seed=4, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def collective(name):
    options = dict(split_axis=0, concat_axis=0) if name == "all_to_all" else {}
    return functools.partial(getattr(st, name), axis_name="x", **options)


def kernels_of(program, *operands):
    """The kernels of a program as text; variables' names and addresses aside."""
    jaxpr = jax.make_jaxpr(program)(*operands)
    kernels = [e for e in edges.equations(jaxpr) if e.primitive.name == "mpmd_map"]
    return [re.sub(r"0x[0-9a-f]+|id=\d+", "", str(eqn)) for eqn in kernels]


@pytest.mark.parametrize("name", [*cases.FORMS, *COLLECTIVES])
def test_kernels_are_the_same(name, simulation):
    if name in COLLECTIVES:
        program = jax.shard_map(
            collective(name), mesh=cases.mesh_of(3), in_specs=P(), out_specs=P(), check_vma=False
        )
        operands = [jax.ShapeDtypeStruct((30, 200), F32)]
    else:
        m, k, n = cases.whole(name, 3, 65, 72, 136)
        options = {"return_gathered": True} if name.startswith("all_gather") else {}
        mesh, (in_specs, out) = cases.mesh_of(3), cases.specs(name)
        call = functools.partial(cases.FORMS[name], axis_name="x", **options)
        program = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(out, P()) if options else out,
            check_vma=False,
        )
        operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((m, k), (k, n))]
    found = kernels_of(program, *operands)
    with jax.enable_x64(False):
        assert found == kernels_of(program, *operands)
    assert found


@pytest.mark.slow  # The kernels are the same, as the test above has it.
@pytest.mark.parametrize("name", cases.FORMS)
def test_numbers(name, simulation):
    lhs, rhs = cases.operands(*cases.whole(name, 2, 9, 24, 40))
    np.testing.assert_array_equal(cases.run(name, lhs, rhs, out_dtype=F32), lhs @ rhs)
    assert simulation.launches == 1


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128", "bfloat16"])
def test_collectives(dtype, simulation):
    """Types of 64 bits and more are moved by the kernels, and added by XLA."""
    x = drawn((2, 4, 6), dtype)

    def all_of_them(x):
        return [collective(name)(x) for name in COLLECTIVES]

    gathered, exchanged, scattered, reduced = per_device(all_of_them, x)
    total = x.astype(np.complex128).sum(0).real if "complex" not in dtype else x.sum(0)
    for device in range(2):
        same_bits(gathered[device], x.reshape(-1, 6))
        half = slice(2 * device, 2 * device + 2)
        same_bits(exchanged[device], x[:, half].reshape(-1, 6))
        same_bits(scattered[device], total[half].astype(x.dtype))
        same_bits(reduced[device], total.astype(x.dtype))
    assert simulation.launches == (4 if dtype == "bfloat16" else 2)


@pytest.mark.parametrize("name", ["all_gather_matmul"])
def test_over_two_nodes(name, simulation):
    lhs, rhs = cases.operands(*cases.whole(name, 4, 8, 8, 8))
    program = cases.mapped(name, cases.mesh_of(2, 2), ("x", "y"), config=None, out_dtype=F32)
    with settings.nodes_of(2):
        out = jax.jit(program)(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    np.testing.assert_array_equal(out, lhs @ rhs)
    assert simulation.launches


class TestKernelsOfOthers:
    """A body needs no types of its own, and elements of 64 bits are refused."""

    def rotate(self, x, dtype=F32):
        team = Team.along("x")

        def body(x_ref, out_ref, *, received, rows, landed):
            successor = team.neighbour(1)

            def step(i, count):
                plgpu.copy_gmem_to_smem(x_ref.at[i % 2], rows, landed)
                plgpu.barrier_wait(landed)
                there = copies.remote(out_ref, team, successor)
                plgpu.copy_smem_to_gmem(rows, there.at[i % 2])
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                return count + 1

            count = lax.fori_loop(0, 2, step, 0)
            received.signal(inc=count, peer_id=successor)
            received.wait(2)

        return kernel.launch(
            body, x, name="rotate", team=team, num_blocks=1,
            out_type=[jax.ShapeDtypeStruct(x.shape, dtype)],
            semaphore_arrays=dict(received=SemaphoreArray()),
            scratch=dict(rows=plgpu.SMEM((8, 128), F32), landed=plgpu.Barrier()),
        )[0]  # fmt: skip

    def test_numbers_of_32_bits(self, simulation):
        x = drawn((3, 2, 8, 128), "float32")
        for got, want in zip(per_device(self.rotate, x), np.roll(x, 1, 0), strict=True):
            same_bits(got, want)

    @pytest.mark.parametrize(
        ("of_x", "of_result", "message"),
        [
            ("float64", "float32", "operand 0 is float64; elements must not be wider than 32 bits"),
            ("float32", "int64", "result 0 is int64; .* lax.bitcast_convert_type"),
        ],
    )
    def test_wider_elements(self, of_x, of_result, message, simulation):
        x = drawn((2, 2, 8, 128), of_x)
        with pytest.raises(NotImplementedError, match=f"kernel rotate: {message}"):
            per_device(functools.partial(self.rotate, dtype=jnp.dtype(of_result)), x)
