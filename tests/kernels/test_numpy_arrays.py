"""NumPy's arrays as operands: they count as the arrays of JAX that they become."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st

DRAW = np.random.default_rng(0)
MATRIX, ROWS = DRAW.standard_normal((16, 16)), DRAW.standard_normal((8, 16))
GROUPS, SIZES = DRAW.standard_normal((2, 16, 16)), np.array([3, 5])
INDEX, WEIGHTS = DRAW.integers(0, 4, (8, 2)), DRAW.random((8, 2))
HEADS = DRAW.standard_normal((1, 8, 1, 16))


def layer(mixture, x):
    return mixture(x, INDEX, WEIGHTS, GROUPS, GROUPS, "x", activation=jax.nn.relu)[0]


CALLS = {
    "all_gather_matmul": lambda x: st.all_gather_matmul(x, MATRIX, "x"),
    "several": lambda x: st.all_gather_matmul(x, [MATRIX, MATRIX], "x")[1],
    "matmul_reduce_scatter": lambda x: st.matmul_reduce_scatter(x, MATRIX, "x"),
    "matmul_all_reduce": lambda x: st.matmul_all_reduce(x, MATRIX, "x"),
    "numpy alone": lambda x: st.matmul_all_reduce(ROWS, MATRIX, "x") + x,
    "grouped_matmul": lambda x: st.grouped_matmul(x, GROUPS, SIZES),
    "expert_dispatch": lambda x: st.expert_dispatch(x, INDEX, "x", num_experts=4)[0],
    "mixture_of_experts": lambda x: layer(st.mixture_of_experts, x),
    "all_reduce_rms_norm": lambda x: st.all_reduce_rms_norm(x, ROWS, MATRIX[0], "x")[1],
    "attention": lambda x: st.context_parallel_attention(x[None, :, None], HEADS, HEADS, "x"),
    "collectives": lambda x: st.all_reduce(st.reduce_scatter(st.all_gather(ROWS, "x"), "x"), "x"),
    "fp8": lambda x: st.fp8.matmul(x, MATRIX),
    "fp8 groups": lambda x: st.fp8.grouped_matmul(x, GROUPS, SIZES),
}


@pytest.mark.parametrize("name", CALLS)
def test_of_64_bits(name, monkeypatch):
    """As the same numbers in the 32 bits that JAX computes with."""
    found = result(name)
    for each in ("MATRIX", "ROWS", "GROUPS", "SIZES", "INDEX", "WEIGHTS", "HEADS"):
        monkeypatch.setitem(globals(), each, jnp.asarray(globals()[each]))
    wanted = result(name)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def result(name: str) -> jax.Array:
    def body(x):
        return jax.tree.leaves(CALLS[name](x))[0]

    program = jax.shard_map(
        body, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    return jax.jit(program)(jnp.ones((16, 16), jnp.float32))


def test_explain_says_the_type_that_is_computed_with():
    def body(x):
        said.append(str(st.explain(st.all_gather_matmul, ROWS, MATRIX, "x")))
        return x

    said: list[str] = []
    program = jax.shard_map(body, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x"))
    jax.eval_shape(program, jnp.ones(4))
    assert "16x16x32 float32" in said[0], said[0]


@pytest.mark.parametrize("number", [np.float64(3), np.int64(3)])
def test_a_number_of_64_bits(number):
    def body(x):
        said.append(str(st.explain(st.all_reduce, number, "x")))
        return x * st.all_reduce(number, "x")

    said: list[str] = []
    program = jax.shard_map(body, mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(program)(jnp.ones(4)), [6] * 4)
    assert f"{number.dtype}".replace("64", "32") in said[0], said[0]


UNHELD = {
    "objects": np.array([[1, None]], object),
    "text": np.array(["a"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "records": np.zeros(4, [("a", "f4")]),
    "other bytes": np.ones((2, 4), np.dtype("f4").newbyteorder("S")),
    "mask": np.ma.masked_array(np.ones(2), mask=[True, False]),
}


@pytest.mark.parametrize("kind", UNHELD)
@pytest.mark.parametrize(
    ("call", "operand"),
    [
        (lambda x, a: st.all_gather(a, "x"), "all_gather: x"),
        (lambda x, a: st.all_gather_matmul(x, [x, a], "x"), "all_gather_matmul: rhs"),
        (
            lambda x, a: st.expert_dispatch(x, expert_index=a, axis_name="x", num_experts=2),
            "expert_dispatch: expert_index",
        ),
        (lambda x, a: st.fp8.matmul(x, a), "fp8.matmul: w"),
        (lambda x, a: st.quantise(a), "quantise: x"),
        (lambda x, a: st.to_zigzag(a, 1), "to_zigzag: x"),
        (lambda x, a: st.from_zigzag(x=a, devices=1), "from_zigzag: x"),
    ],
    ids=["all_gather", "several", "experts", "fp8", "quantise", "to zigzag", "from zigzag"],
)
def test_what_jax_cannot_hold_is_told(kind, call, operand):
    program = jax.shard_map(
        lambda x: call(x, UNHELD[kind]), mesh=mesh_of(2), in_specs=P("x"), out_specs=P("x")
    )
    with pytest.raises(ValueError, match=f"^{operand} is NumPy's .*, which JAX cannot hold; pass"):
        jax.eval_shape(program, jnp.ones((4, 4)))
