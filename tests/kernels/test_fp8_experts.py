"""`stretto.fp8.grouped_matmul` and `mixture_of_experts`: beside float32, by XLA and simulated."""

from __future__ import annotations

import functools
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, TOKENS, routings
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto import fp8
from stretto.kernels.choice import choose

slow = pytest.mark.slow
DEVICES, D, F = 2, 256, 128
RECIPES = {
    "row": fp8.Recipe(),
    "tensor": fp8.Recipe(granularity="tensor", force_pow_2_scales=True),
    "block": fp8.Recipe(granularity="block", bwd_qtype="float8_e4m3fn"),
    "wide": fp8.Recipe(bwd_qtype=None),
}


def normal(seed, *shape, of=1):
    return np.random.default_rng(seed).normal(0, of**-0.5, shape).astype(np.float32)


def error(found, want):
    found = np.asarray(found, np.float32)
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


# --- Groups ---------------------------------------------------------------------------------------

SIZES = np.array([40, 0, 30], np.int32)
ROWS = 80


def of_groups(w):
    """The matrix of each row, zeros for those of no group."""
    group = np.repeat(np.arange(4), [*SIZES, ROWS - SIZES.sum()])
    return jnp.concatenate([w, jnp.zeros_like(w[:1])])[group]


@pytest.mark.parametrize(
    "name", ["tensor", *(pytest.param(n, marks=slow) for n in ("row", "block", "wide"))]
)
def test_groups_and_their_derivatives(name):
    """10 rows belong to no group, and hold NaN, which no scale may see."""
    x, w, c = normal(0, ROWS, D), normal(1, 3, D, F, of=D), normal(2, ROWS, F)
    marked = np.where(np.arange(ROWS)[:, None] < SIZES.sum(), x, np.nan)

    def loss(call, x, w):
        out = call(x, w)
        return jnp.sum(out * c), out

    def ours(x, w):
        return fp8.grouped_matmul(x, w, SIZES, recipe=RECIPES[name], backend="xla")

    def plain(x, w):
        return jnp.einsum("rk,rkn->rn", x, of_groups(w))

    run = jax.jit(jax.value_and_grad(loss, (1, 2), has_aux=True), static_argnums=0)
    (_, out), bars = run(ours, marked, w)
    (_, want), wanted = run(plain, x, w)
    assert out.dtype == F32 and [bar.dtype for bar in bars] == [F32, F32]
    assert 0.005 < error(out, want) < 0.06
    assert (out[SIZES.sum() :] == 0).all() and (bars[0][SIZES.sum() :] == 0).all()
    assert (bars[1][1] == 0).all(), "of a group without rows"
    errors = [error(bar, want) for bar, want in zip(bars, wanted, strict=True)]
    if name == "wide":
        assert max(errors) < 1e-5
    else:
        assert min(errors) > 0.005 and max(errors) < 0.08, errors


@slow
def test_a_scale_for_each_groups_matrix():
    """A small matrix beside a large one is as exact as alone."""
    w = normal(1, 2, D, F, of=D) * np.array([1e-6, 1e6], np.float32)[:, None, None]
    x = normal(0, 32, D)
    recipe = RECIPES["tensor"]
    out = jax.jit(lambda x, w: fp8.grouped_matmul(x, w, jnp.array([16, 16]), recipe=recipe))(x, w)
    for rows, matrix in ((slice(16), w[0]), (slice(16, 32), w[1])):
        assert error(out[rows], x[rows] @ matrix) < 0.06


# --- A layer of experts ---------------------------------------------------------------------------


def operands(seed=0):
    """Tokens of the second device are larger: a scale that stayed at home would be wrong."""
    keys = iter(range(seed, seed + 9))
    tokens = DEVICES * TOKENS
    return (
        normal(next(keys), tokens, D) * np.repeat([0.25, 2], TOKENS).astype(np.float32)[:, None],
        normal(next(keys), tokens, 3),
        normal(next(keys), EXPERTS, D, 2 * F, of=D),
        normal(next(keys), EXPERTS, F, D, of=F),
        normal(next(keys), EXPERTS, 2 * F),
        normal(next(keys), EXPERTS, D),
    )


KEPT = "dispatched", "experts"
INDEX = routings(DEVICES, 1)["any"].astype(np.int32)
BAR = normal(20, DEVICES * TOKENS, D)


def dense(x, weights, w_in, w_out, b_in, b_out):
    z = jnp.einsum("td,edn->etn", x, w_in) + b_in[:, None]
    gate, up = jnp.split(z, 2, axis=2)
    y = jnp.einsum("etf,efd->etd", jax.nn.silu(gate) * up, w_out) + b_out[:, None]
    chosen = jax.nn.one_hot(jnp.where(INDEX < 0, EXPERTS, INDEX), EXPERTS)
    return jnp.einsum("tj,tje,etd->td", weights, chosen, y)


def layer(recipe, *, check_vma=False, dtype=F32, backend="auto"):
    """(the result, gradients of all operands) of whole arrays."""

    def body(index, bar, x, weights, w_in, w_out, b_in, b_out):
        biases = dict(b_in=b_in, b_out=b_out) if b_in is not None else {}
        out, _ = fp8.mixture_of_experts(
            x.astype(dtype),
            index,
            weights,
            w_in,
            w_out,
            "x",
            recipe=recipe,
            backend=backend,
            **biases,
        )
        return lax.psum(jnp.sum(out.astype(F32) * bar), "x"), out

    program = jax.shard_map(
        body,
        mesh=cases.mesh_of(DEVICES),
        in_specs=(P("x"),) * 8,
        out_specs=(P(), P("x")),
        check_vma=check_vma,
    )

    def call(*given):
        return program(INDEX, BAR, *given)

    return jax.jit(jax.value_and_grad(call, tuple(range(6)), has_aux=True))


@functools.cache
def wanted():
    given = operands()
    loss = lambda *xs: jnp.sum(dense(*xs) * BAR)  # noqa: E731
    return np.asarray(dense(*given)), jax.jit(jax.grad(loss, tuple(range(6))))(*given)


@pytest.mark.parametrize(
    ("name", "dtype", "check_vma"),
    [
        ("tensor", BF16, True),
        pytest.param("block", F32, False, marks=slow),
        pytest.param("row", F32, True, marks=slow),
        pytest.param("wide", F32, True, marks=slow),
    ],
)
def test_a_layer_and_its_derivatives(name, dtype, check_vma):
    want, bars_wanted = wanted()
    (_, out), bars = layer(RECIPES[name], dtype=dtype, check_vma=check_vma)(*operands())
    assert out.dtype == dtype
    assert 0.005 < error(out, want) < 0.06
    errors = [error(bar, want) for bar, want in zip(bars, bars_wanted, strict=True)]
    assert max(errors) < 0.1, errors
    if name == "wide":  # Cotangents are not rounded, and that of b_out is a sum of them alone.
        assert errors.pop() < 1e-5
    assert min(errors) > 1e-5, "nothing else of it is exact"
    assert [bar.dtype for bar in bars] == [F32] * 6, "of the operands' own types"


def test_rows_that_a_checkpoint_keeps_are_not_rounded():
    """By the policy of `examples/transformer`: JAX would keep e4m3fn as an IEEE type, up to 240."""

    def loss(x, index):
        def body(x, index, w_in, w_out):
            weights = jnp.ones(index.shape)
            return fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x", backend="xla")[0]

        along = P("x")
        mesh = cases.mesh_of(1)
        return jax.shard_map(
            jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*KEPT)),
            mesh=mesh,
            in_specs=(along, along, along, along),
            out_specs=along,
            check_vma=False,
        )(x, index, *operands_of_two)

    operands_of_two = normal(1, 2, 32, 16), normal(2, 2, 16, 32)
    x, index = jnp.asarray(normal(0, 8, 32)), jnp.asarray([[0], [1]] * 4)
    found = jax.jit(jax.grad(lambda x: jnp.sum(loss(x, index))))(x)
    assert np.isfinite(found).all()


def test_groups_that_a_checkpoint_keeps_are_not_rounded():
    """By a policy that keeps everything."""
    x, w, sizes = normal(0, 8, 32), normal(1, 2, 32, 16), jnp.array([3, 5])
    product = jax.checkpoint(
        lambda w: fp8.grouped_matmul(jnp.asarray(x), w, sizes, backend="xla"),
        policy=jax.checkpoint_policies.everything_saveable,
    )
    found = jax.jit(jax.grad(lambda w: jnp.sum(product(w))))(jnp.asarray(w))
    assert np.isfinite(found).all()


def test_tokens_cross_the_links_in_8_bits():
    """And scales beside them, 16 bytes a token or a block's each: nothing of x's own type moves."""
    with choose.recorded() as choices:
        jax.eval_shape(layer(RECIPES["block"], dtype=BF16), *operands())
    moved = [c.problem for c in choices if c.problem.operation == "expert_dispatch"]
    assert [(p.types.lhs, p.sizes["d"]) for p in moved] == 2 * [
        ("float8_e4m3fn", D),
        ("float32", 4),
    ]
    products = [c.problem for c in choices if c.problem.operation.startswith("grouped_matmul")]
    assert [p.operation for p in products[:4]] == 4 * ["grouped_matmul_fp8_block"]


@pytest.mark.parametrize(
    ("name", "biased"),
    [
        ("row", False),  # The activation is in the first product's kernel.
        pytest.param("row", True, marks=slow),
        pytest.param("block", False, marks=slow),
        pytest.param("block", True, marks=slow),
        pytest.param("tensor", False, marks=slow),
    ],
)
def test_kernels_give_what_xla_gives(name, biased):
    """Forward in the simulator: the moves are the same bits, and products round alike.

    An activation that is stored in 16 bits is quantised to a neighbour here and there. Rows of no
    expert are not made: the simulator fills what nobody wrote with NaN.
    """
    given = [jnp.asarray(x) for x in operands()]
    given = given if biased else [*given[:4], None, None]
    want = layer_alone(RECIPES[name], "xla")(*given)
    call = layer_alone(RECIPES[name], "simulator")
    with st.simulate(core_count=4) as report:
        out = np.asarray(call(*given).astype(F32))
    assert report.ok, str(report)
    assert report.launches == 2 + 2 + 1, "values and scales, two products, the way back"
    want = np.asarray(want, np.float32)
    assert error(out, want) < 0.02
    if biased or name == "block":
        np.testing.assert_allclose(out, want, rtol=0.02, atol=0.02)


def as_it_is(recipe, w):
    return w


@functools.cache
def layer_alone(recipe, backend="auto", prepare=as_it_is):
    """The result alone, in bfloat16; of weights that `prepare` may have quantised."""

    def body(index, x, weights, w_in, w_out, b_in, b_out):
        w_in, w_out = prepare(recipe, w_in), prepare(recipe, w_out)
        given: Any = dict(recipe=recipe, b_in=b_in, b_out=b_out, backend=backend)
        x = x.astype(BF16)
        return fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x", **given)[0]

    program = jax.shard_map(
        body,
        mesh=cases.mesh_of(DEVICES),
        in_specs=(P("x"),) * 7,
        out_specs=P("x"),
        check_vma=False,
    )
    return jax.jit(functools.partial(program, INDEX))


@slow
def test_weights_that_were_quantised_once():
    """The same bits as of weights that each call quantises."""
    given = operands()
    once = layer_alone(RECIPES["tensor"], prepare=fp8.Recipe.weight)(*given)
    each = layer_alone(RECIPES["tensor"])(*given)
    np.testing.assert_array_equal(np.asarray(once, np.float32), np.asarray(each, np.float32))


def test_weights_in_8_bits_have_no_derivative():
    recipe, given = RECIPES["row"], operands()
    once = layer_alone(recipe, prepare=fp8.Recipe.weight)
    with pytest.raises(NotImplementedError, match="no derivative; give the weights themselves"):
        jax.eval_shape(jax.grad(lambda *xs: jnp.sum(once(*xs).astype(F32))), *given)
    half = layer_alone(recipe, prepare=lambda r, w: r.weight(w) if w.shape[1] == D else w)
    with pytest.raises(ValueError, match="some of w_in and w_out are in 8 bits"):
        jax.eval_shape(half, *given)


@pytest.mark.parametrize("recipe", [RECIPES["row"], RECIPES["wide"]], ids=["row", "wide"])
def test_derivatives_of_derivatives_are_refused(recipe):
    """Through the rounding they would be zero."""
    layer, given = layer_alone(recipe), operands()
    x, w = jnp.ones((ROWS, D)), jnp.ones((len(SIZES), D, F))
    losses = {
        "mixture_of_experts": (given[0], lambda x: layer(x, *given[1:])),
        "grouped_matmul": (x, lambda x: fp8.grouped_matmul(x, w, SIZES, recipe=recipe)),
    }
    for name, (x, call) in losses.items():
        first = jax.grad(lambda x, call=call: jnp.sum(call(x).astype(F32) ** 2))
        for second in (
            lambda x, first=first: jax.jvp(first, (x,), (x,)),
            jax.grad(lambda x, first=first: jnp.sum(first(x).astype(F32) ** 2)),
        ):
            with pytest.raises(NotImplementedError, match=f"fp8.{name}: .* call stretto.{name}"):
                jax.eval_shape(second, x)


@pytest.mark.parametrize(
    ("w_in", "message"),
    [
        (np.zeros((EXPERTS, D, F + 1), np.float32), "w_in is float32.*it must be"),
        (np.zeros((EXPERTS, D, F), np.int32), "w_in is int32; it must be floating-point"),
        (3.0, "w_in=3.0 is of type float; it must be an array"),
    ],
)
def test_bad_input(w_in, message):
    x, weights, _, w_out, *_ = operands()

    def body(index, x, weights, w_out):
        return fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x")[0]

    program = jax.shard_map(
        body, mesh=cases.mesh_of(1), in_specs=(P("x"),) * 4, out_specs=P("x"), check_vma=False
    )
    with pytest.raises(ValueError, match=f"fp8.mixture_of_experts: {message}"):
        jax.eval_shape(program, INDEX, x, weights, w_out)


def test_bad_input_names_the_operation_in_8_bits():
    """Not that in which both have their checks."""
    x, weights, w_in, w_out, *_ = operands()

    def call(w_out, b_in):
        def body(index, x, weights, w_in):
            given = dict(b_in=b_in)
            return fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x", **given)[0]

        along = (P("x"),) * 4
        mesh = cases.mesh_of(1)
        program = jax.shard_map(body, mesh=mesh, in_specs=along, out_specs=P("x"), check_vma=False)
        jax.eval_shape(program, INDEX, x, weights, w_in)

    with pytest.raises(ValueError, match=r"fp8.mixture_of_experts: w_out has shape"):
        call(w_out[0], None)
    with pytest.raises(ValueError, match=r"fp8.mixture_of_experts: b_in"):
        call(w_out, [3.0])
