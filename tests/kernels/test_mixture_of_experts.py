"""`mixture_of_experts`: numbers and derivatives as of a dense layer, in both ways to serve it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, TOKENS, on_devices, routings
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.kernels.collectives import dispatch
from stretto.kernels.operations import mixture_rules
from stretto.kernels.problem.activations import ClampedSwiglu
from stretto.kernels.problem.routing import Routing

D, F = 64, 32
SPECS = (P("x"), Routing(P("x"), P("x"), P(), P(), P()))


def operands(devices: int, dtype, *, gated: bool = True, biases: bool = False, seed: int = 0):
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def draw(*shape):
        return (jax.random.normal(next(keys), shape) / 4).astype(dtype)

    x, weights = draw(devices * TOKENS, D), draw(devices * TOKENS, 3).astype(F32)
    columns = 2 * F if gated else F
    w_in, w_out = draw(EXPERTS, D, columns), draw(EXPERTS, F, D)
    more = (draw(EXPERTS, columns), draw(EXPERTS, D)) if biases else ()
    return x, weights, w_in, w_out, *more


def dense(x, weights, w_in, w_out, b_in=None, b_out=None, *, index, activation, gated):
    """Every expert on every token, in float32; nothing of ours."""
    matmul = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    z = matmul("td,edn->etn", x.astype(F32), w_in.astype(F32))
    z = z if b_in is None else z + b_in[:, None]
    h = activation(*jnp.split(z, 2, axis=2)) if gated else activation(z)
    y = matmul("etf,efd->etd", h, w_out.astype(F32))
    y = y if b_out is None else y + b_out[:, None]
    share = jnp.zeros((len(index), EXPERTS))
    for j in range(index.shape[1]):
        one = jax.nn.one_hot(jnp.where(index[:, j] < 0, EXPERTS, index[:, j]), EXPERTS)
        share += weights[:, j, None] * one
    return matmul("te,etd->td", share, y)


def layer(devices: int, biases: bool, **options):
    def body(x, index, weights, w_in, w_out, *more):
        if biases:
            options.update(b_in=more[0], b_out=more[1])
        out, routing = st.mixture_of_experts(x, index, weights, w_in, w_out, "x", **options)
        return out, routing

    return on_devices(body, devices, 7 if biases else 5, SPECS)


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize(
    ("gated", "biases", "activation"),
    [
        pytest.param(True, False, None, marks=pytest.mark.slow),
        pytest.param(False, False, None, marks=pytest.mark.slow),
        (True, True, ClampedSwiglu(limit=0.5)),
    ],
    ids=["gated", "plain", "as gpt-oss"],
)
def test_numbers_and_derivatives_by_xla(devices, gated, biases, activation):
    index = jnp.asarray(routings(devices, 1)["any"], jnp.int32)
    given = operands(devices, F32, gated=gated, biases=biases)
    call = layer(devices, biases, activation=activation, backend="xla")
    default = (lambda g, u: jax.nn.silu(g) * u) if gated else jax.nn.gelu
    plain = functools.partial(dense, index=index, activation=activation or default, gated=gated)
    out, routing = call(given[0], index, *given[1:])
    np.testing.assert_allclose(out, plain(*given), rtol=1e-4, atol=1e-4)
    counts = np.bincount(np.asarray(index)[np.asarray(index) >= 0], minlength=EXPERTS)
    np.testing.assert_array_equal(routing.tokens_per_expert, counts)
    bar = jax.random.normal(jax.random.key(9), out.shape)

    def loss(call, *xs):
        return jnp.sum(call(*xs) * bar)

    every = tuple(range(len(given)))
    found = jax.grad(functools.partial(loss, lambda x, *rest: call(x, index, *rest)[0]), every)(
        *given
    )
    wanted = jax.grad(functools.partial(loss, plain), every)(*given)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def test_derivatives_by_biases_where_types_of_values_are_checked():
    index = jnp.asarray(routings(2, 1)["any"], jnp.int32)
    given = operands(2, F32, biases=True)

    def body(x, index, weights, w_in, w_out, b_in, b_out):
        biases = dict(b_in=b_in, b_out=b_out)
        return st.mixture_of_experts(x, index, weights, w_in, w_out, "x", **biases)[0]

    def gradients(check_vma):
        call = on_devices(body, 2, 7, P("x"), check_vma=check_vma)
        loss = lambda *xs: jnp.sum(jnp.sin(call(xs[0], index, *xs[1:])))  # noqa: E731
        return jax.grad(loss, tuple(range(6)))(*given)

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_forward_mode():
    """Of the composition; the same as the transpose of reverse mode."""
    index = jnp.asarray(routings(2, 1)["any"], jnp.int32)
    given = operands(2, F32)
    call = layer(2, False, backend="xla")
    dots = operands(2, F32, seed=1)
    _, out_dot = jax.jvp(lambda x, *rest: call(x, index, *rest)[0], given, dots)
    plain = functools.partial(
        dense, index=index, activation=lambda g, u: jax.nn.silu(g) * u, gated=True
    )
    _, wanted = jax.jvp(plain, given, dots)
    np.testing.assert_allclose(out_dot, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("backward", "unused_rows", "biases", "tables"),
    [
        (False, False, False, True),
        slow(False, True, False, False),
        slow(True, True, False, False),
        slow(True, True, False, True),
        slow(True, False, True, False),  # Sums of the biases' derivatives go over all rows.
    ],
)
def test_kernels_give_what_xla_gives(backward, unused_rows, biases, tables):
    """In the simulator, which fills memory with NaN: moves are the same, products round alike."""
    index = jnp.asarray(routings(2, 2)["any"], jnp.int32)
    given = operands(2, BF16, biases=biases)

    def program(backend):
        config = mixture_rules.Config(
            unused_rows=unused_rows,
            unused_rows_of_derivatives=unused_rows,
            dispatch=dispatch.Config(tables=tables),
        )
        config = None if backend == "xla" else config
        call = layer(2, biases, backend=backend, config=config)

        def out(*xs):
            return call(xs[0], index, *xs[1:])[0]

        def gradients(*xs):
            loss = lambda *xs: jnp.sum(out(*xs).astype(F32))  # noqa: E731
            return jax.value_and_grad(loss, tuple(range(len(xs))))(*xs)

        return jax.jit(gradients if backward else out)

    plain = jax.tree.map(np.asarray, program("xla")(*given))
    with st.simulate(core_count=4) as report:
        fused = jax.tree.map(np.asarray, program("simulator")(*given))
    assert report.ok, str(report)
    assert biases or report.launches == (2 + 2 + 2 + 4 if backward else 4)
    traced = program("simulator").trace(*given).jaxpr
    assert tables == ("expert_dispatch_with_tables" in str(traced))
    for x, y in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x.astype(F32), y.astype(F32), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(w_in=(EXPERTS, D, F + 1)), "w_in is float32.*it must be"),
        (dict(w_out=(EXPERTS, F, D + 1)), "w_out is float32.*with as many columns as x"),
        (dict(weights=(2 * TOKENS, 2)), "weights is float32"),
    ],
)
def test_bad_input(changes, message):
    shapes = dict(
        x=(2 * TOKENS, D), index=(2 * TOKENS, 3), weights=(2 * TOKENS, 3),
        w_in=(EXPERTS, D, F), w_out=(EXPERTS, F, D),
    ) | changes  # fmt: skip
    given = [jnp.zeros(s, jnp.int32 if name == "index" else F32) for name, s in shapes.items()]
    with pytest.raises(ValueError, match=f"mixture_of_experts: {message}"):
        layer(2, False)(*given)
