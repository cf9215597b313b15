"""Mixture of experts on meshes of two axes, and on whole arrays; bad layouts are refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, TOKENS, routings
from fused_cases import BF16, F32, mesh_of, whole_numbers
from jax.sharding import PartitionSpec as P

import stretto as st

D, F = 64, 16


def layer_operands(tokens: int, dtype=F32):
    """x, index, weights, gate, up and w_out of whole numbers, of which products sum exactly."""
    index = routings(tokens // TOKENS, 4)["any"]
    arrays = (
        whole_numbers(0, tokens, D),
        np.abs(whole_numbers(1, tokens, 3)),
        whole_numbers(2, EXPERTS, D, F, largest=1),
        whole_numbers(3, EXPERTS, D, F, largest=1),
        whole_numbers(4, EXPERTS, F, D, largest=1),
    )
    x, weights, gate, up, w_out = (jnp.asarray(y, dtype) for y in arrays)
    return x, jnp.asarray(index, jnp.int32), weights.astype(F32), gate, up, w_out


def dense(x, index, weights, gate, up, w_out):
    """Every expert on every token."""
    z = jnp.einsum("td,edf->etf", x, gate) + jnp.einsum("td,edf->etf", x, up)
    y = jnp.einsum("etf,efd->etd", z, w_out)
    chosen = jax.nn.one_hot(jnp.where(index < 0, EXPERTS, index), EXPERTS) * weights[..., None]
    return jnp.einsum("tje,etd->td", chosen, y)


def added(gate, up):
    return gate + up


MESHES = {  # Shape; along what tokens lie, and the experts' f.
    "beside data": ((2, 2), ("dp", "ep"), ("dp", "ep"), None),
    "beside tensors": ((2, 2), ("ep", "tp"), "ep", "tp"),
    "over both": ((2, 2), ("a", "b"), ("a", "b"), None),
}


@pytest.mark.parametrize(
    "case",
    ["beside tensors", *(pytest.param(c, marks=pytest.mark.slow) for c in list(MESHES)[::2])],
)
def test_a_layer_on_whole_arrays(case):
    """Out, counts and gradients as on one device."""
    shape, names, tokens, f = MESHES[case]
    team = tokens if case == "over both" else "ep"
    mesh = mesh_of(*shape, axes=names)
    count = TOKENS * (2 if f else 4)
    x, index, weights, gate, up, w_out = layer_operands(count)
    rows, sides, last = P(tokens), P(team, None, f), P(team, f)
    ours = st.sharded(
        st.mixture_of_experts, mesh=mesh, in_specs=(rows, rows, rows, (sides, sides), last)
    )

    def layer(x, weights, gate, up, w_out):
        out, routing = ours(x, index, weights, (gate, up), w_out, team, activation=added)
        return out, routing

    given = x, weights, gate, up, w_out
    out, routing = jax.jit(layer)(*given)
    np.testing.assert_array_equal(out, dense(x, index, weights, gate, up, w_out))
    counts = np.bincount(np.asarray(index)[np.asarray(index) >= 0], minlength=EXPERTS)
    np.testing.assert_array_equal(routing.tokens_per_expert, counts)
    bar = jnp.asarray(whole_numbers(7, count, D, largest=1))
    every = tuple(range(5))
    found = jax.jit(jax.grad(lambda *xs: jnp.sum(layer(*xs)[0] * bar), every))(*given)

    def plain(x, weights, gate, up, w_out):
        return jnp.sum(dense(x, index, weights, gate, up, w_out) * bar)

    for got, want in zip(found, jax.grad(plain, every)(*given), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("team", ["x", pytest.param("y", marks=pytest.mark.slow)])
def test_kernels_along_either_axis_of_a_mesh(team):
    """Dispatch and combine in the simulator: each row of the mesh is a team of its own."""
    mesh = mesh_of(2, 2)
    other = "y" if team == "x" else "x"
    x = whole_numbers(0, 4 * TOKENS, D)
    index = routings(4, 2)["any"]

    def body(x, index):
        rows, routing = st.expert_dispatch(x, index, team, num_experts=EXPERTS)
        return st.expert_combine(rows, jnp.ones(index.shape, F32), routing.positions, team)

    lies = P((other, team))
    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(lies, lies), out_specs=lies, check_vma=False)
    )
    with st.simulate(seed=1, core_count=2) as report:
        out = np.asarray(program(jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32)), np.float32)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, x * (index >= 0).sum(axis=1)[:, None])


def test_dispatch_and_combine_on_whole_arrays():
    """Two teams beside each other, whose counts are added up."""
    mesh = mesh_of(2, 2, axes=("dp", "ep"))
    rows = P(("dp", "ep"))
    whole = functools.partial(st.sharded, mesh=mesh)

    @jax.jit
    def there_and_back(x, index, ones):
        dispatch = whole(st.expert_dispatch, in_specs=(rows, rows))
        sent, routing = dispatch(x, index, "ep", num_experts=EXPERTS)
        combine = whole(st.expert_combine, in_specs=(rows, rows, rows))
        return combine(sent, ones, routing.positions, "ep"), routing

    x, index = whole_numbers(0, 4 * TOKENS, D), routings(4, 0)["out of range"]
    out, routing = there_and_back(
        jnp.asarray(x), jnp.asarray(index, jnp.int32), jnp.ones(index.shape)
    )
    valid = ((index >= 0) & (index < EXPERTS)).sum(axis=1)
    np.testing.assert_array_equal(out, x * valid[:, None])
    assert routing.out_of_range == ((index < -1) | (index >= EXPERTS)).sum()
    assert routing.tokens_per_expert.sum() == valid.sum()


def test_biases_by_name():
    mesh = mesh_of(2, axes=("ep",))
    x, index, weights, gate, _, w_out = layer_operands(2 * TOKENS)
    b_out = jnp.asarray(whole_numbers(9, EXPERTS, D))

    @jax.jit
    def layer(x, index, weights, gate, w_out, **biases):
        specs = (P("ep"),) * (5 + len(biases))
        call = st.sharded(st.mixture_of_experts, mesh=mesh, in_specs=specs)
        return call(x, index, weights, gate, w_out, "ep", activation=lambda z: z, **biases)[0]

    given = x, index, weights, gate, w_out
    chosen = np.where(np.asarray(index)[..., None] < 0, 0, np.asarray(b_out)[np.asarray(index)])
    wanted = (np.asarray(weights)[..., None] * chosen).sum(axis=1)
    with_bias = np.asarray(layer(*given, b_out=b_out))
    np.testing.assert_array_equal(
        with_bias - dense(x, index, weights, gate, 0 * gate, w_out), wanted
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=P()), ValueError, r"rows of x lie along \(\); they must lie along \('ep',\)"),
        (dict(index=P("ep")), ValueError, r"rows of expert_index lie along \('ep',\) and those"),
        (dict(x=P(("ep", "tp"), None)), ValueError, "must lie alike"),
        (dict(w_out=P(None)), ValueError, r"experts of w_out lie along \(\); they must"),
        (dict(x=P(("tp", "ep"), None), index=P(("tp", "ep"))), ValueError, "must lie alike"),
        (dict(f="tp"), ValueError, r"gate and up lie in one matrix.*Pass w_in=\(gate, up\)"),
        (
            dict(w_in=P("ep", None, "tp"), x=P("ep"), index=P("ep"), weights=P("ep")),
            ValueError,
            r"columns of w_in lie along \('tp',\) and the rows of w_out along \(\)",
        ),
        (dict(f="tp", b_out=True), NotImplementedError, "whose devices would each add b_out"),
    ],
)
def test_layouts_that_would_be_wrong_are_refused(changes, error, message):
    mesh = mesh_of(2, 2, axes=("ep", "tp"))
    x, index, weights, gate, up, w_out = layer_operands(4 * TOKENS)
    rows, f = P(("tp", "ep")) if "f" not in changes else P("ep"), changes.get("f")
    specs = dict(x=rows, index=rows, weights=rows, w_in=P("ep", None, f), w_out=P("ep", f))
    specs |= {name: spec for name, spec in changes.items() if name in specs}
    if changes == dict(x=P(("tp", "ep"), None), index=P(("tp", "ep"))):
        specs["weights"] = P("ep")
    more = dict(b_out=jnp.zeros((EXPERTS, D))) if "b_out" in changes else {}
    every = (*specs.values(), P("ep")) if more else tuple(specs.values())
    call = st.sharded(st.mixture_of_experts, mesh=mesh, in_specs=every)
    with pytest.raises(error, match=message):
        jax.eval_shape(
            functools.partial(call, axis_name="ep", **more),
            *(x, index, weights, jnp.concatenate([gate, up], 2), w_out),
        )
