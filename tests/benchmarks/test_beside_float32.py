"""How far results in 8 bits are from the product in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import joined, mesh_of
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing import beside_float32
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Settings, measure
from stretto.benchmarks.timing.operands import Operands
from stretto.kernels.operations import KNOWN

DEVICES = 2
HALF_AN_ULP = 2.0**-9  # of bfloat16, the type of the results


def case(name, values=""):
    sizes = dict(m=1024, k=256, n=256)
    return Case(
        operation=KNOWN[name], sizes=sizes, dtype="bfloat16", devices=DEVICES, values=values
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("all_gather_matmul_fp8", ""),
        ("all_gather_matmul_fp8", "tensor"),
        ("all_gather_matmul_fp8_block", ""),
        ("matmul_reduce_scatter_fp8", "tensor"),
        ("matmul_reduce_scatter_fp8_block", ""),
        ("matmul_all_reduce_fp8", ""),
    ],
)
def test_a_result_rounded_to_bfloat16_is_so_far_from_float32(name, values):
    found = measure(case(name, values), [PEERS["auto"], PEERS["xla"]], Settings(repeats=2), None)
    errors = [timed.float32_error for timed in found.timed]
    assert not found.missing and len(errors) == 2
    for error in errors:
        assert HALF_AN_ULP / 3 < error < 2 * HALF_AN_ULP


def test_groups_and_operands_without_scales_have_no_such_error():
    for name in ("all_gather_matmul", "grouped_matmul_fp8"):
        assert not beside_float32.serves(case(name))


def test_the_rows_compared_are_of_every_shard():
    """A wrong row of the second device's shard shows in the gathered result."""
    one, mesh = case("all_gather_matmul_fp8"), mesh_of(DEVICES)
    (candidate,) = PEERS["xla"].candidates(one, mesh)
    operands = Operands(mesh, one.dtype, Compiler())
    (given,) = operands.sets(candidate, 1)
    body = jax.shard_map(
        candidate.body, mesh=mesh, in_specs=joined(mesh), out_specs=joined(mesh), check_vma=False
    )
    right = np.asarray(jax.jit(body)(*given).astype(jnp.float32))
    wrong = right.copy()
    wrong[512] = 0  # On the first device, the first row that came from the second.
    sharding = NamedSharding(mesh, joined(mesh))
    out = jax.ShapeDtypeStruct(right.shape, jnp.bfloat16, sharding=sharding)
    program = beside_float32.error_program(one, mesh, out, operands.describe(candidate)).compile()
    errors = [
        float(program(jax.device_put(x.astype(jnp.bfloat16), sharding), *given))
        for x in (right, wrong)
    ]
    assert errors[0] < 2 * HALF_AN_ULP
    assert errors[1] == pytest.approx((1 / beside_float32.ROWS / DEVICES) ** 0.5, rel=0.3)
