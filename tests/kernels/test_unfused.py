"""Matmuls of few rows: a kernel that only sends, and XLA's matmul."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32

import stretto as st
from stretto.kernels.operations import OPERATIONS

DEVICES = 3


def unfused(name):
    return OPERATIONS[name].kernels[0].Config(unfused=True)


def simulated(program, *operands, seed=0):
    with st.simulate(seed=seed, core_count=4) as report:
        out = jax.tree.map(np.asarray, program(*operands))
    assert report.ok, str(report)
    return out, report


@pytest.mark.parametrize("name", cases.OPERATIONS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 72, 136), (65, 64, 40)])
def test_any_shape(name, shape):
    lhs, rhs = cases.operands(*cases.whole(name, DEVICES, *shape), seed=sum(shape))
    mesh = cases.mesh_of(DEVICES)
    program = jax.jit(cases.mapped(name, mesh, config=unfused(name), backend="pallas"))
    out, report = simulated(program, jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    np.testing.assert_array_equal(out.astype(np.float32), cases.rounded(lhs @ rhs, BF16))
    assert report.launches == 1


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_rows_that_do_not_divide(rows):
    """An all-reduce takes any number of rows."""
    lhs, rhs = cases.operands(rows, DEVICES * 16, 24)
    name = "matmul_all_reduce"
    program = jax.jit(cases.mapped(name, cases.mesh_of(DEVICES), config=unfused(name)))
    out, _ = simulated(program, jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    np.testing.assert_array_equal(out.astype(np.float32), cases.rounded(lhs @ rhs, BF16))


def test_forms_of_the_gather():
    """Several right-hand sides, transposed, an epilogue, the gathered lhs, a wide result."""
    m, k, sizes = 4, 16, (8, 24)
    lhs = cases.whole_numbers(1, DEVICES * m, k)
    rhs = [cases.whole_numbers(n, DEVICES * n, k) for n in sizes]

    def form(lhs, *rhs, **options):
        return st.all_gather_matmul(
            lhs, rhs, "x", epilogue=jnp.abs, rhs_transposed=True, return_gathered=True,
            out_dtype=F32, **options,
        )  # fmt: skip

    rows, columns = jax.sharding.PartitionSpec("x", None), jax.sharding.PartitionSpec(None, "x")
    config = unfused("all_gather_matmul")
    program = jax.jit(
        jax.shard_map(
            functools.partial(form, config=config),
            mesh=cases.mesh_of(DEVICES),
            in_specs=(rows, rows, rows),
            out_specs=((columns, columns), jax.sharding.PartitionSpec(None, None)),
            check_vma=False,
        )
    )
    bf16 = [jnp.asarray(x, BF16) for x in (lhs, *rhs)]
    (outs, gathered), _ = simulated(program, *bf16)
    for out, x in zip(outs, rhs, strict=True):
        np.testing.assert_array_equal(out, np.abs(lhs @ x.T))
    np.testing.assert_array_equal(gathered.astype(np.float32), lhs)


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_gradients(name):
    lhs, rhs = cases.operands(*cases.whole(name, 2, 4, 16, 24), seed=3)
    lhs, rhs = jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)

    def gradients(**options):
        call = cases.mapped(name, cases.mesh_of(2), out_dtype=F32, **options)
        return jax.jit(jax.grad(lambda x, y: jnp.sum(call(x, y) * 2), argnums=(0, 1)))

    found, _ = simulated(gradients(config=unfused(name), backend="simulator"), lhs, rhs)
    expected = gradients(config=None, backend="xla")(lhs, rhs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x.astype(np.float32), np.asarray(y, np.float32))


def test_sums_do_not_get_worse_with_the_number_of_devices():
    """+256 of one device and +1 of seven others, which a sum in bfloat16 would lose one by one."""
    lhs = np.zeros((8, 8 * 8), np.float32)
    lhs[:, ::8] = 1
    rhs = np.ones((8 * 8, 8), np.float32)
    rhs[0] = 256
    name = "matmul_all_reduce"
    program = jax.jit(cases.mapped(name, cases.mesh_of(8), config=unfused(name)))
    out, _ = simulated(program, jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    np.testing.assert_array_equal(out.astype(np.float32), cases.rounded(lhs @ rhs, BF16))


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_the_tuner_tries_it_for_few_rows_only(name):
    for m, tried in ((64, True), (8192, False)):
        mesh = cases.mesh_of(2)
        with st.simulate():
            problem = explained(name, mesh, m).problem
        configs = list(OPERATIONS[name].kernels[0].candidates(problem))
        assert configs[0].unfused == tried and not any(c.unfused for c in configs[1:])


def explained(name, mesh, m):
    found = []
    in_specs, out_spec = cases.specs(name)
    structs = [
        jax.ShapeDtypeStruct(shape, BF16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip([(m, 512), (512, 512)], in_specs, strict=True)
    ]

    def call(lhs, rhs):
        found.append(st.explain(cases.OPERATIONS[name], lhs, rhs, "x"))
        return cases.OPERATIONS[name](lhs, rhs, "x", backend="xla")

    jax.eval_shape(
        jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False),
        *structs,
    )
    return found[0]
