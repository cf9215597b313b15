"""Calls at the edge of what is served: sizes of none, symbolic sizes, numbers that are traced.

`auto` serves what `lax` would, and what is wrong is told before anything is launched. Most programs
are traced only: what is told here is told there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax import export
from jax.sharding import PartitionSpec as P

import stretto
from stretto.kernels.choice import choose

st: Any = stretto  # Its arguments are of wrong types here.
ROWS, TOKENS, EVERYWHERE = P("x"), P(None, "x"), P()
X, INDEX = jnp.ones((6, 8), BF16), jnp.zeros((6, 2), jnp.int32)
W = jnp.ones((2, 8, 8), BF16)
Q, KV = jnp.ones((1, 8, 4, 4), BF16), jnp.ones((1, 8, 2, 4), BF16)
ROWS_OF_NORM = jnp.ones((4, 256), BF16)
KEYS = jax.random.split(jax.random.key(0), 6)
FP8 = jnp.ones((16, 256), jnp.float8_e4m3fn)


def on_devices(body, *, in_specs=EVERYWHERE, out_specs=EVERYWHERE, **options):
    return jax.shard_map(
        body,
        mesh=cases.mesh_of(2),
        in_specs=in_specs,
        out_specs=out_specs,
        **{"check_vma": False} | options,
    )


def dispatch(x=X, index=INDEX, **options):
    return st.expert_dispatch(x, index, "x", **{"num_experts": 4} | options)


def attend(q=Q, k=KV, **options):
    return st.context_parallel_attention(q, k, k, "x", **options)


def layer(x, index, **options):
    weights = jnp.ones(index.shape)
    return st.mixture_of_experts(x, index, weights, W, W, "x", **options)[0]


def layer8(given, x=X, **options):
    del given
    weights = jnp.ones(INDEX.shape)
    return st.fp8.mixture_of_experts(x, INDEX, weights, W, W, "x", **options)[0]


def gather(x, **options):
    return st.all_gather_matmul(x, x.T, "x", **options)


def scatter(x, **options):
    return st.matmul_reduce_scatter(x, x.T, "x", **options)


def add(x, **options):
    return st.matmul_all_reduce(x, x.T, "x", **options)


def norm(x=ROWS_OF_NORM, **options):
    return st.all_reduce_rms_norm(x, x, x[0], "x", **options)


def total(call, *operands):
    return jax.tree.leaves(call(*operands))[0].astype(F32).sum()


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("call", "operands"),
    [
        (dispatch, (X[:0], INDEX[:0])),
        (dispatch, (X, INDEX[:, :0])),
        pytest.param(layer, (X[:0], INDEX[:0]), marks=pytest.mark.slow),
        (attend, (Q[:0], KV[:0])),
        (attend, (Q, KV[:, :0])),
        (attend, (Q[:, :0], KV)),
    ],
    ids=["tokens", "choices", "layer", "batch", "keys", "queries"],
)
def test_sizes_of_none(call, operands, check_vma):
    """In a simulation, where kernels serve what they can; with derivatives."""
    derivative = jax.grad(functools.partial(total, call))
    program = on_devices(derivative, in_specs=ROWS, out_specs=ROWS, check_vma=check_vma)
    wide = [jnp.concatenate([x, x]) for x in operands]
    with st.simulate(seed=0), choose.recorded() as choices:
        jax.clear_caches()
        found = jax.eval_shape(program, *wide)
    assert found.shape == wide[0].shape
    assert any("empty" in choice.reason for choice in choices)


def test_an_empty_array_of_a_tree():
    with st.simulate(seed=0):
        found = jax.eval_shape(on_devices(lambda x: st.all_gather([x, x[:0]], "x")), X)
    assert [x.shape for x in found] == [(12, 8), (0, 8)]


def test_attention_to_no_keys_is_zero():
    run = on_devices(functools.partial(attend, return_logsumexp=True))
    out, logsumexp = run(Q, KV[:, :0])
    np.testing.assert_array_equal(np.asarray(out, np.float32), 0)
    np.testing.assert_array_equal(logsumexp, -np.inf)


@pytest.mark.parametrize(
    ("call", "shapes", "spec"),
    [
        (functools.partial(attend, causal=True), [(1, "b", 4, 8), (1, "b", 2, 8)], TOKENS),
        (
            functools.partial(attend, causal=True, layout="zigzag", method="heads"),
            [(1, "b", 4, 8), (1, "b", 2, 8)],
            TOKENS,
        ),
        (dispatch, [("b", 8), ("b", 2)], ROWS),
        (layer, [("b", 8), ("b", 2)], ROWS),
    ],
    ids=["attention", "attention by heads", "dispatch", "layer"],
)
def test_symbolic_sizes(call, shapes, spec):
    """Traced with derivatives, of operands and of integers, whose tangents have no type."""
    (b,) = export.symbolic_shape("b")
    types = BF16, BF16 if len(shapes[1]) == 4 else jnp.int32
    structs = [
        jax.ShapeDtypeStruct([8 * b if n == "b" else n for n in shape], dtype)
        for shape, dtype in zip(shapes, types, strict=True)
    ]
    program = on_devices(jax.grad(functools.partial(total, call)), in_specs=spec, out_specs=spec)
    with choose.recorded() as choices:
        assert jax.eval_shape(program, *structs).shape == structs[0].shape
    assert "known when the program runs" in choices[0].reason


traced_numbers = pytest.mark.parametrize(
    ("of_traced", "of_number", "operand"),
    [
        (
            lambda q, s: attend(q, KV, scale=s),
            lambda q, s: attend(q * s.astype(BF16), KV, scale=1),
            Q,
        ),
        (
            lambda x, s: layer(x, INDEX, activation=lambda z: jnp.tanh(z) * s),
            lambda x, s: s.astype(BF16) * layer(x, INDEX, activation=jnp.tanh),
            X,
        ),
        (
            lambda x, s: norm(x, epsilon=s),
            lambda x, s: norm(x, epsilon=0.5),
            ROWS_OF_NORM,
        ),
    ],
    ids=["scale", "activation", "epsilon"],
)


@traced_numbers
@pytest.mark.parametrize("simulated", [False, True])
def test_numbers_that_are_traced_have_derivatives(of_traced, of_number, operand, simulated):
    del of_number
    derivative = jax.grad(lambda x, s: total(of_traced, x, s), (0, 1))
    with st.simulate(seed=0) if simulated else contextlib.nullcontext():
        found = jax.eval_shape(on_devices(derivative), operand, jnp.float32(0.5))
    assert [x.shape for x in found] == [operand.shape, ()]


@pytest.mark.slow
@traced_numbers
def test_numbers_that_are_traced(of_traced, of_number, operand):
    def derivatives(call):
        run = on_devices(jax.value_and_grad(lambda x, s: total(call, x, s), (0, 1)))
        value, (of_operand, _) = jax.jit(run)(operand, jnp.float32(0.5))
        return value, of_operand

    for got, want in zip(derivatives(of_traced), derivatives(of_number), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=1e-3
        )


def test_arrays_of_an_epilogue_beside_scales_have_derivatives():
    def loss(bias):
        out = st.matmul_all_reduce(
            FP8, FP8, "x", lhs_scale=jnp.float32(1), rhs_transposed=True,
            epilogue=st.epilogues.bias(bias), out_dtype=F32,
        )  # fmt: skip
        return jnp.sum(out)

    np.testing.assert_array_equal(on_devices(jax.grad(loss))(jnp.ones(16)), 16)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_results_in_8_bits_after_an_epilogue(op):
    call = functools.partial(getattr(st, op), axis_name="x", epilogue="gelu")
    x = jnp.ones((16, 16), BF16)
    out = jax.eval_shape(on_devices(lambda x: call(x, x, out_dtype=FP8.dtype)), x)
    assert out.dtype == FP8.dtype


def traced(x):
    return x.ravel()[0].astype(jnp.int32)


@pytest.mark.parametrize(
    ("call", "operand", "message"),
    [
        (lambda x: st.all_gather(x, "x", axis=1.0), X, "all_gather: axis=1.0 is of type float"),
        (lambda x: st.all_gather(x, "x", axis=traced(x)), X, "an integer that is known when"),
        (lambda x: st.all_gather(x, "x", axis=None, tiled=False), X, "axis=None is of type"),
        (lambda x: st.all_to_all(x, "x", split_axis="a", concat_axis=0), X, "split_axis='a'"),
        (lambda x: st.quantise(x, axis=-1.0), X, "quantise: axis=-1.0 is of type float"),
        *(
            (functools.partial(call, axis_name="x", op=op), X.astype(dtype), message)
            for call in (st.all_reduce, st.reduce_scatter)
            for op, dtype, message in (
                ("max", jnp.complex64, "x is complex64, which has no order and so no op='max'"),
                ("min", jnp.complex64, "x is complex64, which has no order and so no op='min'"),
                ("sum", jnp.int2, "x is int2, of which XLA has no op='sum' over devices; cast"),
                ("max", jnp.uint2, "x is uint2, of which XLA has no op='max' over devices"),
            )
        ),
        *(
            (functools.partial(call, axis_name="x", op=op), KEYS, "x is key<fry>, random keys")
            for call in (st.all_reduce, st.reduce_scatter)
            for op in ("sum", "max")
        ),
        (lambda x: st.all_reduce([x], "x"), KEYS, "all_reduce: x is key<fry>, random keys"),
        (lambda x: st.all_reduce([x], "x", op="max"), X + 0j, "x is complex64, which has no"),
        (lambda x: st.all_gather(x, {"x"}), X, "is no name; pass one, or a tuple"),
        (lambda x: dispatch(x, num_experts=4.0), X, "num_experts=4.0 is of type float"),
        (lambda x: dispatch(x, capacity=1.5), X, "capacity=1.5 is of type float"),
        (lambda x: dispatch(x, capacity=traced(x)), X, "an integer that is known when"),
        (lambda q: attend(q, window=2.5, causal=True), Q, "window=2.5 is of type float"),
        (lambda q: attend(q, window=traced(q), causal=True), Q, "an integer that is known"),
        (lambda q: attend(q, causal=traced(q)), Q, "causal is traced; it must be known"),
        *(
            (functools.partial(attend, scale=scale), Q, "must be a real number, or an array of")
            for scale in ("x", jax.random.key(0), np.complex64(1), jnp.complex64(1))
        ),
        (lambda x: norm(x, epsilon=None), ROWS_OF_NORM, "epsilon=None must be a number"),
        (lambda x: st.token_positions(2.0, "x"), X, "token_positions: tokens=2.0 is of type"),
        (lambda x: st.token_positions(-2, "x"), X, "tokens=-2 must not be negative"),
        (lambda x: st.to_zigzag([1, 2], 1), X, "to_zigzag: x=.* it must be an array"),
        (lambda x: st.fp8.matmul(x, x.T, recipe="row"), X, "fp8.matmul: recipe='row' must be"),
        (lambda x: st.fp8.matmul(x, x.T), X.astype(int), "fp8.matmul: x is int32; it must be"),
        (lambda x: layer(x, INDEX, activation="mish"), X, "activation='mish' is not one of"),
        (lambda x: layer(x, INDEX, activation=jnp.add), X, "cannot be applied to 1 float32"),
        (lambda x: layer(x, INDEX, activation=lambda z: z[:, :4]), X, "it must be elementwise"),
        (
            lambda x: layer(x, INDEX, activation=jax.nn.softmax),
            X,
            "activation softmax must be elementwise, and reduce_max is not",
        ),
        (lambda x: layer(x, INDEX, b_out=1.0), X, "b_out=1.0 is of type float"),
        (lambda x: scatter(x, axis=None), X, "axis=None is of type NoneType; it must be an int"),
        (lambda x: scatter(x, axis=None, lhs_scale=1.0), FP8, "axis=None is of type NoneType"),
        *(
            (functools.partial(call, rhs_transposed="no"), X, "rhs_transposed='no' is of type str")
            for call in (gather, scatter, add)
        ),
        (lambda x: add(x, rhs_transposed=traced(x)), X, "rhs_transposed is traced; it must be"),
        (
            lambda x: st.grouped_matmul(x, W, INDEX[:2, 0], rhs_transposed=[1]),
            X,
            r"grouped_matmul: rhs_transposed=\[1\] is of type list; it must be True or False",
        ),
        (lambda x: gather(x, return_gathered="both"), X, "return_gathered='both' is of type str"),
        (lambda x: gather(x, keep_gathered=1.0), X, "keep_gathered=1.0 is of type float"),
        (lambda x: st.quantise(x, force_pow_2_scales="no"), X, "force_pow_2_scales='no' is of"),
        *(
            (functools.partial(layer8, **given), X, f"fp8.mixture_of_experts: {message}")
            for given, message in (
                (dict(recipe=None), "recipe=None must be a stretto.fp8.Recipe"),
                (dict(recipe="hybrid"), "recipe='hybrid' must be a stretto.fp8.Recipe"),
                (dict(x=None), "x=None is of type NoneType; it must be an array"),
            )
        ),
        (lambda x: st.matmul_all_reduce(x, x.T, "x", out_dtype="bf16"), X, "out_dtype=.* is no t"),
    ],
)  # fmt: skip
def test_bad_input_is_told(call, operand, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_devices(call), operand)
