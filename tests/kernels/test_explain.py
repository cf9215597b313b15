"""`stretto.explain` makes the choice of the call, of whatever kind and wherever operands are."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.choice.choice import Choice

described = jax.ShapeDtypeStruct
X, W = described((8, 16), BF16), described((16, 8), BF16)
INDEX, WEIGHTS = described((8, 2), jnp.int32), described((8, 2), F32)
W_IN, W_OUT = described((2, 16, 8), BF16), described((2, 8, 16), BF16)
BIAS, ROWS = described((2, 8), F32), described((8, 16), jnp.float8_e4m3fn)
SCALE = described((8, 1), F32)
# The operation, its operands before the axis and its other arguments; sizes of the choice.
CALLS = {
    "gather of several": (st.all_gather_matmul, [X, [W, W]], {}, (16, 16, 32)),
    "sum of pairs": (st.matmul_reduce_scatter, [(X, X), (W, W)], {}, (8, 64, 8)),
    "tree": (st.all_reduce, [{"a": X, "b": W}], {}, (1, 256)),
    "pair between operands": (
        st.mixture_of_experts,
        [X, INDEX, WEIGHTS, (W_IN, W_IN), W_OUT],
        dict(b_in=(BIAS, BIAS)),
        (16, 16, 16, 8, 2, 4),
    ),
    "scales, of which one is missing": (
        st.all_gather_matmul,
        [ROWS, (ROWS, ROWS)],
        dict(rhs_transposed=True, lhs_scale=SCALE, rhs_scale=(SCALE, None)),
        (16, 16, 32),
    ),
    "arrays of an epilogue": (
        st.all_gather_matmul,
        [X, W],
        dict(epilogue=(lambda y, b: y + b, described((8,), F32))),
        (16, 16, 16),
    ),
}


def on_two_devices(operation, *operands, **arguments) -> Choice:
    found = []

    def body() -> None:
        found.append(st.explain(operation, *operands, **arguments))

    jax.eval_shape(jax.shard_map(body, mesh=cases.mesh_of(2), in_specs=(), out_specs=None))
    return found[0]


@pytest.mark.parametrize("arrays", [False, True], ids=["described", "arrays"])
@pytest.mark.parametrize("name", CALLS)
def test_operands_in_tuples_and_trees(name, arrays):
    operation, operands, arguments, sizes = CALLS[name]
    if arrays:
        operands, arguments = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype) if isinstance(x, described) else x,
            (operands, arguments),
        )
    choice = on_two_devices(operation, *operands, "x", **arguments)
    assert tuple(choice.problem.sizes.values()) == sizes


def test_whole_arrays_tell_how_they_lie():
    """As they do to the call, on a mesh whose axes are in no types."""
    mesh = cases.mesh_of(2)
    x, w = np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)
    x, w = (
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in ((x, P("x", None)), (w, P(None, "x")))
    )
    gather = st.sharded(st.all_gather_matmul)
    assert gather(x, w, "x").shape == (8, 8)
    assert tuple(st.explain(gather, x, w, "x").problem.sizes.values()) == (8, 16, 8)


def test_a_number_in_an_array_is_known():
    x, weight = described((8, 256), BF16), described((256,), BF16)
    with st.simulate(seed=0):
        for epsilon, backend in ((jnp.float32(1e-6), "simulator"), (described((), F32), "xla")):
            choice = on_two_devices(st.all_reduce_rms_norm, x, x, weight, "x", epsilon=epsilon)
            assert choice.backend == backend
