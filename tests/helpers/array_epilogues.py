"""All-gather matmuls whose epilogues take arrays: their results by XLA and in the simulator."""

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.choice import choose


def with_arrays(gated, *, transposed=False, gather_axis="m", config=None, sizes=(72, 136)):
    """A bias and a residual, or a pair of products and a residual: by XLA and by the kernel.

    `sizes` are a device's k and n.
    """
    along_k = gather_axis == "k"
    name = "all_gather_matmul_k" if along_k else "all_gather_matmul"
    m, k, n = cases.whole(name, 2, 131, *sizes)
    lhs, rhs = (jnp.asarray(x, BF16) for x in cases.operands(m, k, n))
    up = jnp.asarray(cases.whole_numbers(3, k, n), BF16)
    bias = jnp.asarray(cases.whole_numbers(4, n), F32)
    residual = jnp.asarray(cases.whole_numbers(5, m, n), BF16)
    turn = np.transpose if transposed else lambda x: x

    def call(backend, lhs, rhs, up, bias, residual):
        first = st.epilogues.gated(jax.nn.relu) if gated else st.epilogues.bias(bias)
        return st.all_gather_matmul(
            lhs,
            (rhs, up) if gated else rhs,
            "x",
            rhs_transposed=transposed,
            epilogue=st.epilogues.chain(first, st.epilogues.residual(residual)),
            gather_axis=gather_axis,
            backend=backend,
            config=None if backend == "xla" else config,
        )

    side = P("x") if transposed else P(None, "x")
    specs = P(None, "x") if along_k else P("x"), side, side, P("x"), P(None, "x")
    found = []
    for backend in ("xla", "simulator"):
        program = jax.shard_map(
            functools.partial(call, backend),
            mesh=cases.mesh_of(2),
            in_specs=specs,
            out_specs=P(None, "x"),
            check_vma=False,
        )
        with st.simulate(core_count=4), choose.recorded() as choices:
            out = jax.jit(program)(lhs, turn(rhs), turn(up), bias, residual)
            found.append(np.asarray(out, np.float32))
    assert "the kernel applies the epilogue" in str(choices[0])
    return found
